/* The functions of the module blitz_attn._core, in the order of ops.c. What each takes stands in _core.pyi. */
#ifndef BA_PYTHON_OPS_H
#define BA_PYTHON_OPS_H

#include "python/args.h"

#define DECLARE_FUNCTION(name) PyObject *py_##name(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)

DECLARE_FUNCTION(block_sparse_attention);
DECLARE_FUNCTION(merge_states);
DECLARE_FUNCTION(get_num_threads);
DECLARE_FUNCTION(set_num_threads);
DECLARE_FUNCTION(num_threads_source);
DECLARE_FUNCTION(isa_levels);
DECLARE_FUNCTION(isa_detected);
DECLARE_FUNCTION(isa_active);
DECLARE_FUNCTION(isa_set_cap);
DECLARE_FUNCTION(isa_note);
DECLARE_FUNCTION(cpu_model);
DECLARE_FUNCTION(kernels);
DECLARE_FUNCTION(probe_flops);
DECLARE_FUNCTION(probe_read);

#endif
