"""ProphetNet's vocabulary: BERT's word pieces, with the special tokens as words of the file."""

from __future__ import annotations

from fairseq.data import Dictionary

_SPECIAL = {"bos": "[CLS]", "pad": "[PAD]", "eos": "[SEP]", "unk": "[UNK]"}
_BEFORE_WORDS = 999  # lines of BERT's vocabulary that are special or unused


class BertDictionary(Dictionary):
    """A dictionary that numbers words as the file does, without special tokens of fairseq before them."""

    @classmethod
    def load(cls, f: str) -> BertDictionary:
        """The dictionary in the file `f`: a word and its count on each line, separated by white space.

        Special tokens that are not in the file come after the words. A word that is there twice counts once, as when
        the checkpoints were trained. Raises ValueError for a line without a count.
        """
        made = cls()
        made.symbols, made.count, made.indices = [], [], {}  # without those that fairseq 0.12.2 always puts first
        with open(f, encoding="utf-8", errors="ignore") as lines:
            for number, line in enumerate(lines, 1):
                word, *count = line.rsplit(maxsplit=1)[:2] or [""]
                if len(count) != 1 or not count[0].isdigit():
                    raise ValueError(f"{f}, line {number}: {line.rstrip()!r} is not a word and its count.")
                made.add_symbol(word, n=int(count[0]))
        for name, word in _SPECIAL.items():
            setattr(made, f"{name}_word", word)
            setattr(made, f"{name}_index", made.add_symbol(word, n=0))
        made.nspecial = _BEFORE_WORDS
        return made

    def save(self, f: str) -> None:
        """Write all words, special tokens included, in the form that `load` reads."""
        names, values = self._get_meta()
        self._save(f, zip([*names, *self.symbols], [*values, *self.count], strict=True))
