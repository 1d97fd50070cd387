"""Refuses flags of fairseq-generate that can't work, in a sentence, before anything is loaded."""

from __future__ import annotations

import os
from typing import Any

from fairseq import utils

from fastgen.pipeline.errors import InputError


def check(cfg: Any) -> None:
    """Raise InputError for flags at which fairseq-generate would fail, and for missing files."""
    _check_search(cfg.generation)
    _check_numbers(cfg)
    _check_files(cfg)


def _check_search(generation: Any) -> None:
    if generation.sampling and generation.nbest != generation.beam:
        raise InputError("--sampling needs --nbest to be equal to --beam.")
    if generation.score_reference:  # there is no search
        return
    if generation.beam < 1:
        raise InputError(f"--beam must be at least 1, not {generation.beam}.")
    if generation.temperature <= 0:
        raise InputError(f"--temperature must be above 0, not {generation.temperature}.")
    for name in ("sampling_topk", "sampling_topp"):
        if getattr(generation, name) >= 0 and not generation.sampling:
            raise InputError(f"--{name.replace('_', '-')} needs --sampling.")
    groups = generation.diverse_beam_groups
    if groups > 0 and generation.beam % groups:
        raise InputError(f"--diverse-beam-groups {groups} needs a --beam that it divides, not {generation.beam}.")


def _check_numbers(cfg: Any) -> None:
    seed, parallel = cfg.common.seed, cfg.distributed_training
    if seed is not None and not 0 <= seed < 2**32:
        raise InputError(f"--seed must be from 0 to 4294967295, not {seed}.")
    if cfg.dataset.num_workers < 0:
        raise InputError(f"--num-workers must be 0 or more, not {cfg.dataset.num_workers}.")
    world, rank = parallel.distributed_world_size, parallel.distributed_rank
    if world < 1 or not 0 <= rank < world:
        raise InputError(f"--distributed-rank {rank} must be from 0 to below --distributed-world-size, here {world}.")


def _check_files(cfg: Any) -> None:
    generation, paths = cfg.generation, cfg.common_eval.path
    if not paths:
        raise InputError("--path is needed: the model's checkpoint, or several separated by a colon.")
    for path in [*utils.split_paths(paths), *([generation.lm_path] if generation.lm_path else [])]:
        sharded = cfg.checkpoint.checkpoint_suffix or cfg.checkpoint.checkpoint_shard_count > 1
        if "://" not in path and not sharded and not os.path.isfile(path):
            raise InputError(f"There is no checkpoint file {path}.")
    for folder in str(getattr(cfg.task, "data", None) or "").split(os.pathsep):
        if folder and "://" not in folder and not os.path.exists(folder):  # a task's may be a file
            raise InputError(f"There is no data folder {folder}.")
    if generation.replace_unk is not None and cfg.dataset.dataset_impl != "raw":
        raise InputError("--replace-unk needs the raw text: --dataset-impl raw.")
    dictionary = generation.replace_unk
    if isinstance(dictionary, str) and dictionary and not os.path.isfile(dictionary):
        raise InputError(f"There is no alignment dictionary {dictionary}, which --replace-unk names.")
