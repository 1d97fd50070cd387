"""The configuration of a GPT-2 that decodes latent vectors."""

from __future__ import annotations

from typing import Any

from transformers import GPT2Config


class Gpt2VaeConfig(GPT2Config):
    """GPT-2's configuration, with options of the conditioning on a latent vector.

    `latent_size`: how many numbers a latent has; 32 by default, as in Optimus's code.
    `latent_as_memory`: in each layer one key and value, a projection of the latent, that every token attends to.
    `latent_as_embedding`: a projection of the latent is added to the embedding of every token.

    Raises ValueError if a latent has no numbers, or the decoder would not see it.
    """

    model_type = "gpt2_vae"

    def __init__(
        self, latent_size: int = 32, latent_as_memory: bool = True, latent_as_embedding: bool = True, **options: Any
    ) -> None:
        if latent_size < 1:
            raise ValueError(f"latent_size={latent_size} leaves a latent no numbers.")
        if not (latent_as_memory or latent_as_embedding):
            raise ValueError("latent_as_memory and latent_as_embedding are both False: nothing would see the latent.")
        self.latent_size = latent_size
        self.latent_as_memory = latent_as_memory
        self.latent_as_embedding = latent_as_embedding
        super().__init__(**options)
