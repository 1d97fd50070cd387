"""Generates for the rows of a `ray.data.Dataset`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from fastgen.pipeline.transformers import generation_fields, records
from fastgen.pipeline.transformers.batches import WINDOW
from fastgen.pipeline.transformers.settings import RunSettings

if TYPE_CHECKING:
    import ray.data

# Arguments of the command that are about files, or that `generate` takes in another way.
_NOT_OPTIONS = set(
    """model input output input_format output_format on_error resume overwrite quiet references metrics ray
    shards generation actors cpus_per_actor gpus_per_actor""".split()
)


def generate(
    dataset: ray.data.Dataset,
    model: str,
    *,
    actors: str | int | None = None,
    cpus_per_actor: float | None = None,
    gpus_per_actor: float | None = None,
    **options: Any,
) -> ray.data.Dataset:
    """The dataset with what `model` generates for each row, in the columns `outputs` and `error`.

    It is lazy, as all of Ray Data: nothing runs until rows are read or written.

    Args:
        dataset: the column `text_field` (default: "text") has the inputs, as strings.
        model: name or folder of a model of Hugging Face transformers, which every node can reach.
        actors: number of copies of the model, or "LEAST:MOST"; by default one for each GPU, else one for each node.
        cpus_per_actor: by default 1 with a GPU, else all of the node.
        gpus_per_actor: by default 1 if the cluster has GPUs.
        options: options of `fastgen-generate-transformers`, with underscores: `batch_size=64`, `task_prefix="..."`; and
            fields of transformers' GenerationConfig: `num_beams=4`, `max_new_tokens=100`.

    Returns: `outputs` is a list of `{"text": str, "score": float or None}`, best first; for a row that can't be used
        it is None, and `error` is a sentence that says why.

    Raises:
        TypeError: there is no such option.
        InputError: an option's value can't be used. Errors that only the workers can find, such as a model that can't
            be loaded, are raised by Ray when the dataset runs.
    """
    import ray.data

    from fastgen.distributed.job import Job
    from fastgen.distributed.placement import nodes_of, placement
    from fastgen.distributed.worker import RowWorker

    settings = _settings(model, options)
    if not ray.is_initialized():
        ray.init()  # as Ray's own functions would do
    how = placement(None if actors is None else str(actors), cpus_per_actor, gpus_per_actor, nodes_of(ray.nodes()))
    return dataset.map_batches(
        RowWorker,
        fn_constructor_args=(Job(settings, records.PARQUET),),
        compute=ray.data.ActorPoolStrategy(min_size=how.least, max_size=how.most, max_tasks_in_flight_per_actor=2),
        num_cpus=how.cpus,
        num_gpus=how.gpus,
        batch_size=WINDOW,
        batch_format="pyarrow",
    )


def _settings(model: str, options: dict[str, Any]) -> RunSettings:
    """The settings of a run, from options and fields of GenerationConfig."""
    fields = generation_fields.field_types()
    known = {each.name for each in dataclasses.fields(RunSettings)} - _NOT_OPTIONS
    if unknown := next((name for name in options if name not in known and name not in fields), None):
        raise TypeError(f"generate() has no option {unknown!r}")
    generation = {name: value for name, value in options.items() if name in fields}
    generation_fields.check(generation, generation_fields.flag_of)
    others = {name: value for name, value in options.items() if name not in fields}
    return RunSettings(model=model, input="", output="", generation=generation, **others)
