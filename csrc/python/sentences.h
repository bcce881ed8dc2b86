/* The exceptions that refuse an argument. Their texts are `name: expected ..., got ...`: a TypeError where the argument is of a wrong kind, a
 * ValueError where its shape or value is wrong. Each function raises an exception and returns -1; only arg_check() returns 0 for BA_OK. */
#ifndef BA_PYTHON_SENTENCES_H
#define BA_PYTHON_SENTENCES_H

#include <pyconfig.h>
#if !defined(Py_LIMITED_API) && !defined(Py_GIL_DISABLED) /* free-threaded builds have no stable ABI before 3.15 */
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "core/status.h"

/* Raises an exception whose text PyUnicode_FromFormat() makes, and returns -1. BA_ARG() marks the names of arguments in `format`, as for ba_fail().
 * Where the text begins with a name, the exception has the attribute `sentence`, a tuple of str that join to the text: names stand at even indices,
 * and the text between names at odd ones. Wrappers in Python replace the names by their own. */
int arg_fail(PyObject *exception, const char *format, ...);

/* Returns 0 for BA_OK. For any other status, raises the exception of this status with the text of ba_last_error(), as arg_fail() does, and returns
 * -1. For BA_INTERRUPTED the exception of the signal handler is already set. */
int arg_check(ba_status status);

/* Raises a TypeError `name: expected <expected>, got <the type of object>`, and returns -1. */
int arg_fail_kind(const char *name, const char *expected, PyObject *object);

/* Called when one of the object's own methods has raised an exception: replaces it by a ValueError that names the argument and has the first
 * exception as its cause. Exceptions that are not the argument's fault (KeyboardInterrupt, MemoryError) stay as they are. Returns -1. */
int arg_fail_raising(const char *name, const char *expected, PyObject *object);
int arg_fail_unreadable(const char *name, PyObject *object);

#endif
