"""Slow float64 NumPy twins of the public operations: the oracle of the tests and the specification in code.

Each twin has the name and the arguments of the operation that it mirrors (some leave out `num_threads`), and computes in float64. Twins
share with the library only signatures and the code that reads some arguments, so that a mistake of the library is not repeated here. A
wrong argument that would give a wrong result is refused in a sentence; other wrong arguments fail with an error of NumPy. Score matrices
are built a strip of query rows at a time, so that memory stays bounded for sequences of tens of thousands of tokens.

`dense_same_precision`, `dense_same_precision_backward`, `paged_same_precision` and `nsa_same_precision` compute the same attention as a
plain array program would, in the precision of the inputs. Their errors are the yardsticks of the tests.
"""

from ._reference import backward as _backward
from ._reference import common as _common
from ._reference import dense as _dense
from ._reference import nsa as _nsa
from ._reference import nsa_parts as _nsa_parts
from ._reference import paged as _paged
from ._reference import quest as _quest
from ._reference import select as _select
from ._reference.backward import *
from ._reference.common import *
from ._reference.dense import *
from ._reference.nsa import *
from ._reference.nsa_parts import *
from ._reference.paged import *
from ._reference.quest import *
from ._reference.select import *

__all__: list[str] = []
__all__ += _backward.__all__
__all__ += _common.__all__
__all__ += _dense.__all__
__all__ += _nsa.__all__
__all__ += _nsa_parts.__all__
__all__ += _paged.__all__
__all__ += _quest.__all__
__all__ += _select.__all__
