/* Choosing tokens. */
#include "python/call.h"

OPERATION(select_tokens, ba_select_tokens_args, SELECT_TOKENS, TOKENS_scores, TOKENS)

PyObject *py_select_tokens(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    BEGIN_CALL(select_tokens, ba_select_tokens_args, ba_select_tokens_args_init());
    bool failed = call_read(&call, false) < 0;
    const arg_list *const cu_q = call_list(&call, TOKENS_cu_seqlens_q), *const cu_kv = call_list(&call, TOKENS_cu_seqlens_kv);
    a.batch = failed || cu_q->values == NULL ? 0 : cu_q->count - 1;
    if (!failed && cu_q->values != NULL && cu_kv->values != NULL)
        failed = arg_expect_count(cu_kv, "cu_seqlens_kv", cu_q->count, "as many as " BA_ARG("cu_seqlens_q") " has") < 0;
    const bool packed = cu_q->values != NULL, has_sequences = packed ? a.batch >= 0 : a.q.ndim == 4; /* else the library refuses them */
    const int64_t sequences = packed ? a.batch : a.q.dims[0];
    failed = failed || (has_sequences && (call_read_each(&call, 0, sequences, "one per sequence") < 0 ||
                                          call_expect_lengths(&call, sequences, "one per sequence") < 0));
    RUN_AND_END(failed, ba_select_tokens(&a));
}
