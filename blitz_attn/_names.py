"""The strings that some arguments take, for type checkers and editors. Calls check these arguments at run time, too."""

from typing import Literal, get_args

Layout = Literal["BNSD", "BSND", "BSH", "TND"]
KVLayout = Literal["NHD", "HND"]
Method = Literal["quest", "mean", "max"]

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
KV_LAYOUTS: tuple[KVLayout, ...] = get_args(KVLayout)
