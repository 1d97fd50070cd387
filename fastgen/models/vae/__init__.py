"""A text VAE's decoder: GPT-2 conditioned on a latent vector, as in Optimus (Li et al. 2020, arXiv 2004.04092)."""

from fastgen.models.vae.configuration import Gpt2VaeConfig
from fastgen.models.vae.modeling import Gpt2VaeLMHeadModel, Gpt2VaeModel

__all__ = ["Gpt2VaeConfig", "Gpt2VaeLMHeadModel", "Gpt2VaeModel"]
