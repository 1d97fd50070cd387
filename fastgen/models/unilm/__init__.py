"""UniLM (Dong et al. 2019, https://arxiv.org/abs/1905.03197) as a model of Hugging Face transformers.

Importing this makes `AutoConfig` and `AutoModelForCausalLM` know the model type `unilm`.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from fastgen.models.unilm.configuration import UnilmConfig
from fastgen.models.unilm.modeling import UnilmForSeq2Seq, UnilmModel
from fastgen.models.unilm.processors import NoRepeatNGramExceptLogitsProcessor

__all__ = ["NoRepeatNGramExceptLogitsProcessor", "UnilmConfig", "UnilmForSeq2Seq", "UnilmModel"]

AutoConfig.register(UnilmConfig.model_type, UnilmConfig, exist_ok=True)
AutoModelForCausalLM.register(UnilmConfig, UnilmForSeq2Seq, exist_ok=True)
