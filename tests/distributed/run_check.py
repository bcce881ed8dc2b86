"""Runs ``python -m blitz_attn.distributed`` with this script's arguments. LEVEL_OF_RANK_1 sets the instruction set level of rank 1."""

import os
import runpy

rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
if rank == "1" and os.environ.get("LEVEL_OF_RANK_1"):
    os.environ["BLITZ_ATTN_ISA"] = os.environ["LEVEL_OF_RANK_1"]
runpy.run_module("blitz_attn.distributed", run_name="__main__")
