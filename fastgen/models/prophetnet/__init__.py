"""ProphetNet for fairseq, in the layout of its published checkpoints.

Qi et al., "ProphetNet: Predicting Future N-gram for Sequence-to-Sequence Pre-training" (2020). Importing this registers
the model `ngram_transformer_prophet` and architectures of it, the task `translation_prophetnet` and the criterion
`ngram_language_loss`; so does `--user-dir` with this folder. Checkpoints are saved with these names.
"""

# Imported by full names: as a --user-dir this package is imported a second time, and must not register twice.
from fastgen.models.prophetnet import criterion as criterion
from fastgen.models.prophetnet import model as model
from fastgen.models.prophetnet import task as task
