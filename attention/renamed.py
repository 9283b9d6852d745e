"""Names of presets, bases and values of sites as records of published runs hold them, and what they are called now; and one alias."""

from __future__ import annotations

RECOMMENDED = "flash_consistent"
"""The preset that ``scaled_dot_product_attention`` uses unless told otherwise, and that "robust" stands for."""

RENAMED = {
    "robust": RECOMMENDED,
    "paper": "rounded_forward",
    "flash_subtracted": "flash_subtract_first",
    "flash_unfused": "flash_separate_multiply",
    "flash_delta_from_p_subtracted": "flash_delta_from_p_subtract_first",
    "flash_run_a": "flash_stochastic_o",
    "flash_run_b": "flash_o_stochastic_delta_nearest",
    "flash_run_c": "flash_o_fp32_delta_nearest",
    "flash_run_d": "flash_o_nearest_delta_stochastic",
    "flash_delta_normalised": "flash_delta_normalized",
    "flash_centred_keys": "flash_centered_keys",
    "delta=rowsum_p_dp_normalised": "delta=rowsum_p_dp_normalized",
    "row_residual=centred_keys": "row_residual=centered_keys",
    "row_max=stabilised": "row_max=stabilized",
    "row_max=stabilised_safe": "row_max=stabilized_safe",
    "exponent=folded": "exponent=fma",
    "exponent=unfused": "exponent=separate_multiply",
    "exponent=subtracted": "exponent=subtract_first",
}


def today(name: str) -> str:
    """What a preset, a base or ``site=value`` is called now. Old names stay valid wherever a new one is."""
    return RENAMED.get(name, name)


def today_in_record(content: object) -> object:
    """A record's JSON with today's names in the fields that hold one."""
    if isinstance(content, list):
        return [today_in_record(item) for item in content]
    if not isinstance(content, dict):
        return content
    return {
        name: today(value)
        if name in ("preset", "numerics") and isinstance(value, str)
        else [today(site) for site in value]
        if name == "sites" and isinstance(value, list)
        else today_in_record(value)
        for name, value in content.items()
    }
