"""A text VAE's decoder: GPT-2 conditioned on a latent vector, as in Optimus (Li et al. 2020, arXiv 2004.04092).

Importing this makes `AutoConfig` and `AutoModelForCausalLM` know the model type `gpt2_vae`.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from fastgen.models.vae.configuration import Gpt2VaeConfig
from fastgen.models.vae.modeling import Gpt2VaeLMHeadModel, Gpt2VaeModel

__all__ = ["Gpt2VaeConfig", "Gpt2VaeLMHeadModel", "Gpt2VaeModel"]

AutoConfig.register(Gpt2VaeConfig.model_type, Gpt2VaeConfig, exist_ok=True)
AutoModelForCausalLM.register(Gpt2VaeConfig, Gpt2VaeLMHeadModel, exist_ok=True)
