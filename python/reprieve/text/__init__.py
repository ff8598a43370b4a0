"""Text: tokenizer, incremental detokenizer, stop strings and chat templates."""

from reprieve.text.chat import ChatTemplate
from reprieve.text.detokenizer import Detokenizer
from reprieve.text.load import Text, load_text
from reprieve.text.stops import StopStrings
from reprieve.text.stream import TextStream
from reprieve.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "Text", "TextStream", "Tokenizer", "load_text"]
