"""ProphetNet for fairseq, in the layout of its published checkpoints.

Qi et al., "ProphetNet: Predicting Future N-gram for Sequence-to-Sequence Pre-training" (2020). Importing this registers
the model `ngram_transformer_prophet` with its architectures, the task `translation_prophetnet` and the criterion
`ngram_language_loss`; so does `--user-dir` with this folder. The names are those that checkpoints are saved with.
"""

# By their full names: as a --user-dir this package is imported a second time, and may register nothing twice.
from fastgen.models.prophetnet import criterion as criterion
from fastgen.models.prophetnet import model as model
from fastgen.models.prophetnet import task as task
