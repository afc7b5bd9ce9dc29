"""The page's style sheet; colours pass 4.5:1 against their background in light and in dark."""

STYLE = """
:root{--bg:#fbfbf9;--fg:#1c2024;--soft:#5b636b;--rule:#dcdfe2;--card:#fff;--good:#0b6b4f;
--goodbg:#e4f4ec;--bad:#a4262c;--badbg:#fbe9e8;--note:#7a4b00;--notebg:#fdf1d8;
--arm0:#67707a;--arm1:#0a7d8c;--arm2:#b4581a;--arm3:#6b4fa3;--hatch:#fbfbf9}
@media (prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e6e8ea;--soft:#a2abb3;--rule:#333a40;
--card:#1c2125;--good:#6fd3ab;--goodbg:#12322a;--bad:#ff9a94;--badbg:#3d1c1e;--note:#f0c674;
--notebg:#362b12;--arm0:#a4adb6;--arm1:#4cc3d1;--arm2:#ee9a5b;--arm3:#b39ae6;--hatch:#14171a}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1240px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:25px;line-height:1.25;margin:0 0 4px}
h2{font-size:17px;margin:34px 0 8px}
.sub,.note{color:var(--soft);margin:4px 0 0}.note{font-size:13px}.sub{margin-bottom:16px}
.verdict{border-left:5px solid var(--soft);background:var(--card);padding:10px 14px;
border-radius:0 6px 6px 0}
.verdict.good{border-color:var(--good);background:var(--goodbg)}
.verdict.good strong{color:var(--good)}
.verdict.bad{border-color:var(--bad);background:var(--badbg)}.verdict.bad strong{color:var(--bad)}
.verdict ul{margin:6px 0 0;padding-left:20px}
.notice{background:var(--notebg);color:var(--note);padding:10px 14px;border-radius:6px;
margin:14px 0 0}
.cards{display:flex;flex-wrap:wrap;gap:12px}
.card{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 16px;
min-width:150px;flex:0 1 230px}
.card b{display:block;font-size:24px;font-variant-numeric:tabular-nums}
.card small{color:var(--soft)}
.key{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:7px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;margin:2px 0 4px}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(560px,100%),1fr));
gap:0 24px}
.chart.narrow{display:none}.chart svg{display:block;max-width:100%}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:var(--soft);
font-variant-numeric:tabular-nums}
svg .axis{fill:var(--fg)}svg .grid{stroke:var(--rule);stroke-width:1}
svg .line{fill:none;stroke-width:2.2}svg .whisker{stroke-width:1.4}
.s0{--c:var(--arm0)}.s1{--c:var(--arm1)}.s2{--c:var(--arm2)}.s3{--c:var(--arm3)}
svg .line,svg .whisker{stroke:var(--c)}svg .mark,svg .fill{fill:var(--c)}
.key{background:var(--c)}
.key.hatched{background:repeating-linear-gradient(45deg,var(--c) 0 3px,var(--hatch) 3px 5px)}
svg .hatch{fill:url(#hatching)}svg .hatchline{fill:var(--hatch);opacity:.75}
svg .outcome{fill:var(--soft)}svg .o-hit,svg .o-local_hit{fill:var(--good)}
svg .o-append{fill:var(--arm2)}svg .o-miss,svg .o-disabled{fill:var(--arm0)}
svg .o-failed,svg .o-error,svg .o-expired,svg .o-history_changed{fill:var(--bad)}
.scroll{overflow-x:auto;border:1px solid var(--rule);border-radius:8px;background:var(--card)}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:6px 7px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--rule)}
th{color:var(--soft);font-weight:600}tbody tr:last-child td{border-bottom:0}
th:first-child,td:first-child{text-align:left}
details table td{white-space:normal;text-align:left}details table th{text-align:left}
summary{cursor:pointer;font-weight:600;margin:26px 0 8px}
.checks{list-style:none;margin:0;padding:0;display:grid;gap:8px}
.checks li{display:flex;gap:12px;align-items:flex-start}
.tag{flex:0 0 68px;text-align:center;font-size:12px;border-radius:10px;padding:1px 0;
margin-top:2px}
.tag.good{background:var(--goodbg);color:var(--good)}
.tag.bad{background:var(--badbg);color:var(--bad)}
@media (max-width:720px){main{padding:16px 12px 40px}.chart.wide{display:none}
.chart.narrow{display:block}h1{font-size:21px}.card{flex:1 1 140px}}
"""
