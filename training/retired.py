"""What is gone: fields of earlier configs, and what a config.json or a checkpoint that has them means today."""

from __future__ import annotations

from typing import Any

from attention.renamed import today_in_record
from errors import invalid

ANY = None
"""Every value of the field computes what is computed today, to the last bit."""
RETIRED: dict[str, tuple[object, ...] | None] = {
    "speed.late_values": ANY,
    "speed.fill_memory": ANY,
    "speed.loss_chunk": (0, 32_768),  # off and on of speed.reference
    "speed.fused_norm": (False,),
    "speed.fused_mlp": (False,),
    "speed.float32_gradients": (False,),
    "speed.sorted_embedding": (False,),
    "speed.fused_clip": (False,),
    "speed.compile_mode": ("default",),
    "speed.exchange": ("ddp",),
    "speed.overlap": (False,),
    "speed.bucket_mb": (25,),
    "speed.coordinate_descent": (False,),
    "optim.newton_schulz": ("each", "graph"),
    "model.z_loss": (0.0,),
    "model.logit_softcap": (0.0,),
    "precision.fill_memory": ANY,
    "data.record_tokens": (False,),
    "telemetry.details": ANY,
    "telemetry.cuda_graph": ANY,
    "alarm.delta_z": (0.0,),
    "alarm.delta_probes": ANY,
    "alarm.delta_bias": ANY,
    "wandb.name": ANY,
    "wandb.tags": ANY,
}
"""Field -> values that a run of today goes on with, to the same bits. Commit c487be1 has the code for the others."""


def upgraded(content: dict[str, Any], goes_on_from: object = None) -> dict[str, Any]:
    """The JSON of a config, as today's code would have written it.

    ``goes_on_from``: the checkpoint whose run is to go on with it, which takes the same arithmetic. Without one only the model and what it
    was trained on matter, and every value is dropped.

    Raises ``UserError`` for a value that today's code does not compute with.
    """
    result = {name: dict(section) if isinstance(section, dict) else section for name, section in content.items()}
    if "attention" in result:
        result["attention"] = today_in_record(result["attention"])
    speed, run = result.get("speed"), result.get("run")
    plain = not (isinstance(speed, dict) and speed.get("loss_chunk"))
    for field, alike in RETIRED.items():
        section, name = field.split(".")
        if not (isinstance(result.get(section), dict) and name in result[section]):
            continue
        value = result[section].pop(name)
        if goes_on_from is not None and alike is not ANY and value not in alike:
            expected = " or ".join(map(repr, alike))
            raise invalid(
                field, value, f"{expected} to go on from {goes_on_from}: commit c487be1 has what else it could be"
            )
    if goes_on_from is not None:
        speed = result.setdefault("speed", {})
    if isinstance(speed, dict):
        speed.setdefault("reference", plain)
    if isinstance(run, dict) and isinstance(run.get("resume"), bool):  # it was a switch
        run["resume"] = "yes" if run["resume"] else "no"
    return result
