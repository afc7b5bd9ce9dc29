"""Changing values of a spec file and nothing else of it: comments and order stay."""

from collections.abc import Sequence

import yaml

from pdctl.errors import PdctlError


def with_value(text: str, keys: Sequence[str], value: str) -> str:
    """The file's text with one value set; a missing key is added at its section's beginning.

    Args:
        keys: section and key, such as ``("kv_transfer", "decode_ttl")``.
        value: as YAML text.

    Raises:
        PdctlError: the file is no mapping with block sections there.
    """
    section_name, key = keys
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise PdctlError("the spec cannot be edited: it is not written as a block mapping")
    section = next((v for k, v in root.value if k.value == section_name), None)
    if section is None:
        return f"{text.rstrip()}\n\n{section_name}:\n  {key}: {value}\n"
    if not isinstance(section, yaml.MappingNode) or section.flow_style or not section.value:
        raise PdctlError(f"the spec cannot be edited: {section_name} is not a block mapping")
    for name, node in section.value:
        if name.value == key:
            return text[: node.start_mark.index] + value + text[node.end_mark.index :]
    first = section.value[0][0].start_mark
    line = f"{key}: {value}\n{' ' * first.column}"
    return text[: first.index] + line + text[first.index :]
