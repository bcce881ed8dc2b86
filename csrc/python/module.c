/* blitz_attn._core: the C library as a Python extension. It uses multi-phase initialisation, keeps all its state per module, and defines no
 * static types, so several interpreters may load it. */
#include "python/ops.h"

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL | METH_KEYWORDS, NULL},
static PyMethodDef methods[] = {CORE_FUNCTIONS(METHOD){NULL, NULL, 0, NULL}};

#define ADDRESS(name) &operation_##name,
const operation *const core_operations[CORE_COUNT] = {CORE_FUNCTIONS(ADDRESS)};

static int module_exec(PyObject *module) {
    module_state *state = PyModule_GetState(module);
    state->dlpack_method = PyUnicode_InternFromString("__dlpack__");
    state->dlpack_arguments = PyTuple_New(0);
    state->dlpack_keywords = Py_BuildValue("{s(ii)}", "max_version", DL_MAJOR_VERSION, 0);
    if (state->dlpack_method == NULL || state->dlpack_arguments == NULL || state->dlpack_keywords == NULL) return -1;
    for (int i = 0; i < CORE_COUNT; i++)
        if (arg_intern(state, i, core_operations[i]) < 0) return -1;
    if (PyModule_AddStringConstant(module, "__version__", BA_VERSION) < 0) return -1;
    return PyModule_AddStringConstant(module, "compiler", __VERSION__);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    module_state *state = PyModule_GetState(module);
    Py_VISIT(state->dlpack_method);
    Py_VISIT(state->dlpack_arguments);
    Py_VISIT(state->dlpack_keywords);
    Py_VISIT(state->masked);
    return 0;
}

static int module_clear(PyObject *module) {
    module_state *state = PyModule_GetState(module);
    Py_CLEAR(state->dlpack_method);
    Py_CLEAR(state->dlpack_arguments);
    Py_CLEAR(state->dlpack_keywords);
    Py_CLEAR(state->masked);
    for (int i = 0; i < CORE_COUNT; i++) arg_forget(state, i, core_operations[i]);
    return 0;
}

static void module_free(void *module) { module_clear(module); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_multiple_interpreters /* CPython 3.12 */
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#ifdef Py_mod_gil /* CPython 3.13 */
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,          .m_name = "_core",       .m_doc = "The compiled core of blitz_attn. Use the functions of the package instead.",
    .m_size = sizeof(module_state), .m_methods = methods,    .m_slots = slots,
    .m_traverse = module_traverse,  .m_clear = module_clear, .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
