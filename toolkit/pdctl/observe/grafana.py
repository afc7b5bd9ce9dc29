"""Boards as Grafana's JSON, through Grafana's own typed builders.

Needs the extra ``observability``; what it makes is checked in, so nothing else does.
"""

import json
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.builders import barchart, common, heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus as source
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as shared
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from pdctl.observe.alerts import playbook_url, slug_of
from pdctl.observe.conditions import DEFAULT_PLAYBOOKS
from pdctl.observe.panel import PLAYBOOKS, VARIABLES, Board, Panel, Query

SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "pdctl"
_HEIGHT = 8
_STAT_HEIGHT = 5


def dashboard_json(board: Board) -> str:
    """The dashboard as a file has it."""
    return json.dumps(_dashboard(board), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _dashboard(board: Board) -> model.Dashboard:
    made = (
        build.Dashboard(board.title)
        .uid(board.uid)
        .description(board.text)
        .tags([TAG])
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .link(
            build.DashboardLink("pdctl")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(
            build.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
    )
    for name in VARIABLES:
        made.with_variable(
            build.QueryVariable(name)
            .datasource(SOURCE)
            .query(f'label_values(up{{job="{TAG}"}}, {name})')
            .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(model.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(model.VariableOption(text="All", value="$__all", selected=True))
        )
    made.with_variable(_constant("ttft_slo", "2.5"))
    made.with_variable(_constant("playbooks", DEFAULT_PLAYBOOKS))
    number, y = 0, 0
    for row in board.rows:
        made.with_row(build.Row(row.title).grid_pos(model.GridPos(h=1, w=24, x=0, y=y)))
        y = bottom = y + 1
        for panel, place in _places(row.panels, y):
            number += 1
            made.with_panel(_panel(panel).id(number).grid_pos(place))
            bottom = max(bottom, place.y + place.h)
        y = bottom
    return made.build()


def _places(panels: tuple[Panel, ...], y: int) -> Iterator[tuple[Panel, model.GridPos]]:
    """Panels side by side, a new line where one does not fit any more."""
    x, height = 0, 0
    for panel in panels:
        if x + panel.width > 24:
            x, y, height = 0, y + height, 0
        own = _STAT_HEIGHT if panel.kind == "stat" else _HEIGHT
        height = max(height, own)
        yield panel, model.GridPos(h=own, w=panel.width, x=x, y=y)
        x += panel.width


def _constant(name: str, value: str) -> build.ConstantVariable:
    return build.ConstantVariable(name).value(value)


def _panel(panel: Panel) -> Any:
    made = _KINDS[panel.kind](panel)
    made.title(panel.title).unit(panel.unit).datasource(SOURCE).description(
        f"What good looks like: {panel.good}"
    )
    made.links(
        [
            build.DashboardLink("Playbook")
            .type(model.DashboardLinkType.LINK)
            .url(playbook_url(PLAYBOOKS, slug_of(panel.alert)))
            .target_blank(True)
        ]
    )
    made.no_value("no data")
    for index, query in enumerate(panel.queries):
        made.with_target(_target(panel, query, chr(ord("A") + index)))
    return made


def _target(panel: Panel, query: Query, letter: str) -> source.Dataquery:
    made = (
        source.Dataquery().expr(query.expr).legend_format(query.legend or "__auto").ref_id(letter)
    )
    if panel.kind in ("bars", "table"):
        return made.instant().format(PromQueryFormat.TABLE)
    if panel.kind == "stat":
        return made.instant()
    if panel.kind == "heatmap":
        made.format(PromQueryFormat.HEATMAP)
    return made.range().exemplar(query.exemplars)


def _lines(panel: Panel) -> Any:
    made = (
        timeseries.Panel()
        .line_width(2)
        .fill_opacity(0)
        .min(0)
        .show_points(shared.VisibilityMode.AUTO)
        .legend(_legend())
        .tooltip(common.VizTooltipOptions().mode(shared.TooltipDisplayMode.MULTI))
    )
    if panel.top is not None:
        made.max(panel.top)
    if panel.limit is not None:
        made.thresholds(
            build.ThresholdsConfig()
            .mode(model.ThresholdsMode.ABSOLUTE)
            .steps(
                [
                    model.Threshold(value=None, color="transparent"),
                    model.Threshold(value=panel.limit, color="red"),
                ]
            )
        ).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(shared.GraphThresholdsStyleMode.LINE)
        )
    return made


def _stacked(panel: Panel) -> Any:
    return (
        _lines(panel)
        .fill_opacity(40)
        .stacking(common.StackingConfig().mode(shared.StackingMode.NORMAL).group("A"))
    )


def _stat(panel: Panel) -> Any:
    return (
        stat.Panel()
        .graph_mode(shared.BigValueGraphMode.NONE)
        .color_mode(shared.BigValueColorMode.NONE)
        .text_mode(shared.BigValueTextMode.VALUE_AND_NAME)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def _heatmap(panel: Panel) -> Any:
    return (
        heatmap.Panel()
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit(panel.unit))
        .exemplars_color("rgba(255,0,255,0.7)")
    )


def _bars(panel: Panel) -> Any:
    (label,) = panel.by
    made = (
        barchart.Panel()
        .x_field(label)
        .min(0)
        .show_value(shared.VisibilityMode.AUTO)
        .legend(_legend())
        .with_transformation(_transform("joinByField", byField=label, mode="outer"))
        .with_transformation(_transform("sortBy", fields={}, sort=[{"field": label}]))
        .with_transformation(_only(panel))
    )
    return _names(made, panel)


def _table(panel: Panel) -> Any:
    made = table.Panel().with_transformation(_only(panel))
    return _names(made, panel) if not _is_settings(panel) else made


def _only(panel: Panel) -> model.DataTransformerConfig:
    """Keep the labels and the values, in that order."""
    values = [] if _is_settings(panel) else ["Value", *map(_value, range(len(panel.queries)))]
    return _transform("filterFieldsByName", include={"names": [*panel.by, *values]})


def _names(made: Any, panel: Panel) -> Any:
    for index, query in enumerate(panel.queries):
        names = [_value(index)] + (["Value"] if len(panel.queries) == 1 else [])
        shown = query.legend if "{{" not in query.legend else panel.title
        for name in names:
            made.override_by_name(name, [model.DynamicConfigValue("displayName", shown)])
    return made


def _is_settings(panel: Panel) -> bool:
    """Whether only the labels tell something (an info metric, always 1)."""
    return panel.kind == "table" and panel.unit == "none"


def _value(index: int) -> str:
    return f"Value #{chr(ord('A') + index)}"


def _transform(name: str, **options: Any) -> model.DataTransformerConfig:
    return model.DataTransformerConfig(id_val=name, options=options)


def _legend() -> common.VizLegendOptions:
    return (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(shared.LegendDisplayMode.LIST)
        .placement(shared.LegendPlacement.BOTTOM)
    )


_KINDS = {
    "lines": _lines,
    "stacked": _stacked,
    "stat": _stat,
    "heatmap": _heatmap,
    "bars": _bars,
    "table": _table,
}
