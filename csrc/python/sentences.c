#include "python/sentences.h"

/* Splits a sentence that begins with a name at the marks of BA_ARG(). Returns a list of str, or NULL with an exception set. */
static PyObject *split_sentence(PyObject *marked) {
    const Py_ssize_t length = PyUnicode_GetLength(marked);
    PyObject *parts = PyList_New(0);
    bool in_name = true;
    for (Py_ssize_t at = 1; parts != NULL; in_name = !in_name) {
        Py_ssize_t end = PyUnicode_FindChar(marked, in_name ? BA_ARG_END : BA_ARG_BEGIN, at, length, 1);
        if (end < 0) end = length; /* there is no other name, or the sentence was cut within a name */
        PyObject *part = PyUnicode_Substring(marked, at, end);
        if (part == NULL || PyList_Append(parts, part) < 0) Py_CLEAR(parts);
        Py_XDECREF(part);
        if (end + 1 >= length) break;
        at = end + 1;
    }
    return parts;
}

/* Raises an exception as arg_fail() does. Takes over the reference `marked`. Where `marked` is NULL, an exception is already set. */
static void raise_sentence(PyObject *exception, PyObject *marked) {
    if (marked == NULL) return;
    if (PyUnicode_FindChar(marked, BA_ARG_BEGIN, 0, 1, 1) != 0) { /* no name at its beginning */
        PyErr_SetObject(exception, marked);
        Py_DECREF(marked);
        return;
    }
    PyObject *parts = split_sentence(marked), *nothing = PyUnicode_FromString("");
    PyObject *text = parts != NULL && nothing != NULL ? PyUnicode_Join(nothing, parts) : NULL;
    PyObject *error = text != NULL ? PyObject_CallFunctionObjArgs(exception, text, NULL) : NULL;
    PyObject *sentence = error != NULL ? PyList_AsTuple(parts) : NULL;
    if (sentence != NULL && PyObject_SetAttrString(error, "sentence", sentence) == 0) PyErr_SetObject(exception, error);
    Py_XDECREF(sentence);
    Py_XDECREF(error);
    Py_XDECREF(text);
    Py_XDECREF(nothing);
    Py_XDECREF(parts);
    Py_DECREF(marked);
}

int arg_fail(PyObject *exception, const char *format, ...) {
    va_list args;
    va_start(args, format);
    raise_sentence(exception, PyUnicode_FromFormatV(format, args));
    va_end(args);
    return -1;
}

int arg_fail_kind(const char *name, const char *expected, PyObject *object) {
    PyObject *type = PyType_GetName(Py_TYPE(object));
    if (type != NULL) arg_fail(PyExc_TypeError, BA_ARG("%s") ": expected %s, got %U", name, expected, type);
    Py_XDECREF(type);
    return -1;
}

/* The first line of an exception's text, or the name of its type where it has no text. Returns a new reference, or NULL with an exception set. */
static PyObject *first_line(PyObject *exception) {
    PyObject *text = PyObject_Str(exception);
    PyObject *lines = text != NULL ? PyUnicode_Splitlines(text, 0) : NULL;
    Py_XDECREF(text);
    PyObject *line = NULL;
    if (lines != NULL && PyList_Size(lines) > 0) line = Py_NewRef(PyList_GetItem(lines, 0));
    Py_XDECREF(lines);
    PyErr_Clear(); /* str() of the exception may have raised */
    return line != NULL ? line : PyType_GetName(Py_TYPE(exception));
}

int arg_fail_raising(const char *name, const char *expected, PyObject *object) {
    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)) return -1;
    PyObject *type, *cause, *traceback;
    PyErr_Fetch(&type, &cause, &traceback);
    PyErr_NormalizeException(&type, &cause, &traceback);
    if (traceback != NULL) PyException_SetTraceback(cause, traceback);
    PyObject *object_type = PyType_GetName(Py_TYPE(object));
    PyObject *why = object_type != NULL ? first_line(cause) : NULL;
    if (why != NULL) arg_fail(PyExc_ValueError, BA_ARG("%s") ": expected %s, got %U that raises: %U", name, expected, object_type, why);
    Py_XDECREF(why);
    Py_XDECREF(object_type);
    Py_XDECREF(type);
    Py_XDECREF(traceback);

    PyObject *new_type, *error, *new_traceback;
    PyErr_Fetch(&new_type, &error, &new_traceback);
    PyErr_NormalizeException(&new_type, &error, &new_traceback);
    PyException_SetCause(error, cause); /* steals cause */
    PyErr_Restore(new_type, error, new_traceback);
    return -1;
}

int arg_fail_unreadable(const char *name, PyObject *object) { return arg_fail_raising(name, "an array whose memory can be read", object); }

int arg_check(ba_status status) {
    PyObject *const exceptions[] = {[BA_ERROR_TYPE] = PyExc_TypeError, [BA_ERROR_VALUE] = PyExc_ValueError, [BA_ERROR_MEMORY] = PyExc_MemoryError};
    if (status == BA_OK) return 0;
    if (status == BA_INTERRUPTED) return -1; /* the signal handler's exception is set */
    const bool known = (size_t)status < sizeof exceptions / sizeof *exceptions && exceptions[status] != NULL;
    raise_sentence(known ? exceptions[status] : PyExc_RuntimeError, PyUnicode_FromString(ba_last_marked_error()));
    return -1;
}
