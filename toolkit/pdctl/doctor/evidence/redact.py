"""Taking keys, tokens and prompts out of evidence."""

from __future__ import annotations

import re

GONE = "<redacted>"

_SECRET_NAME = re.compile(
    r"(?:KEY|TOKEN|SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIAL|COOKIE|SIGNATURE|AUTH)", re.IGNORECASE
)
_NO_SECRET = re.compile(
    r"(?:_FILE|_PATH|_DIR|TOKENIZERS_PARALLELISM|\w*_TOKENS|MAX_\w*TOKENS?|TOKENS_\w+|XAUTHORITY|_COUNT)$",
    re.IGNORECASE,
)
"""Names that only sound like it: where a secret lies, or how many tokens."""

_PARTS = [
    # Well-known forms of credentials, wherever they stand.
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{4,}", re.IGNORECASE), rf"\1 {GONE}"),
    (re.compile(r"\b(?:hf|ghp|gho|ghs|github_pat|glpat|xox[abp])[_-][A-Za-z0-9_-]{8,}"), GONE),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{8,}"), GONE),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), GONE),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"), GONE),
    (re.compile(r"(://[^/\s:@'\"]*:)[^/\s@'\"]+@"), rf"\1{GONE}@"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*", re.DOTALL), GONE),
    # NAME=value, "name": "value", --name value.
    (
        re.compile(
            r"((?:^|[\s,{('\"-])[\w-]*"
            r"(?:api[_-]?key|secret|passw(?:or)?d|access[_-]?key|auth[_-]?token|hf[_-]?token|"
            r"session[_-]?token|security[_-]?token|x-pd-key|x-api-key|authorization|cookie|pd_sig)"
            r"(?![\w-]*_(?:file|path))[\w-]*(?:['\"]\s*[=:,]|\s*[=:]|\s)\s*)"
            r"(?!<redacted>|(?:Bearer|Basic) <redacted>|None\b|null\b|True\b|False\b)"
            r"(?:'[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^\s,}'\"]+)",
            re.IGNORECASE,
        ),
        rf"\1{GONE}",
    ),
    # Prompts and messages as engines and routers log them; what follows on the line goes too.
    (
        re.compile(
            r"((?:\b|['\"])(?:prompt|messages|prompt_token_ids|input_text|content|input_ids|"
            r"generated_text)['\"]?\s*[:=]\s*)(?!<redacted>)"
            r"(?:'(?:[^'\\]|\\.)*(?:'|$)|\"(?:[^\"\\]|\\.)*(?:\"|$)|\[(?![\]]).*)"
        ),
        rf"\1{GONE}",
    ),
]

HINTS = (
    "Bearer bearer Basic basic hf_ ghp_ gho_ ghs_ github_pat glpat xox sk- AKIA ASIA eyJ :// "
    "PRIVATE api_key api-key apikey API_KEY ApiKey secret SECRET Secret password PASSWORD Password "
    "passwd PASSWD access_key access-key ACCESS_KEY auth_token AUTH_TOKEN auth-token HF_TOKEN "
    "hf-token hf_token session_token SESSION_TOKEN session-token security_token SECURITY_TOKEN "
    "X-PD-Key x-pd-key api-key Api-Key authorization Authorization AUTHORIZATION cookie Cookie "
    "pd_sig prompt messages input_text content input_ids generated_text"
).split()
"""A text without one of these holds nothing that :func:`text` takes out."""


def text(value: str) -> str:
    """Without credentials and prompts; line by line, so that one line does not hide the next."""
    if not any(hint in value for hint in HINTS):
        return value
    return "\n".join(map(_line, value.split("\n")))


def _line(line: str) -> str:
    for pattern, instead in _PARTS:
        line = pattern.sub(instead, line)
    return line


def secret(name: str) -> bool:
    """Whether a variable of this name holds a secret."""
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET.search(name)


def variable(name: str, value: str) -> str:
    """A variable's value as it may be kept."""
    return GONE if secret(name) else text(value)
