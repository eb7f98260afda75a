"""Wrong versions of what files, traces, paged steps and constructors are looked at for."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_PAGED = "tests/unit/test_paged_arguments.py"
_FILES = "tests/unit/test_written_files.py"
_TRACES = "tests/unit/test_planning_trace.py"
_PLANS = "tests/unit/test_planning_arguments.py"
_REPORTS = "tests/unit/test_inspect_command.py"
_MADE = "tests/adapters/test_constructors.py"

MUTATIONS = (
    Mutation(
        "slots-from-elsewhere-dropped",
        "slots on another device are refused",
        "adapters/paged/arguments.py",
        "if slots is not None and not slots.is_cpu and slots.device != device:",
        "if False:",
        (f"{_PAGED}::test_a_tensor_on_another_device_is_refused_before_anything_is_written",),
    ),
    Mutation(
        "pages-below-zero",
        "a page that a token lies in is at least 0",
        "adapters/paged/batch.py",
        "            if least < 0:",
        "            if False:",
        (f"{_PAGED}::test_a_step_is_laid_out_from_integers",),
    ),
    Mutation(
        "pages-cut-to-integers",
        "a step is laid out from integers alone",
        "adapters/paged/integers.py",
        'return array("i", values)',
        'return array("i", map(int, values))',
        (f"{_PAGED}::test_a_step_is_laid_out_from_integers",),
    ),
    Mutation(
        "written-before-the-batch-is-looked-at",
        "a write that is refused leaves the buffers as they were",
        "adapters/paged/buffers.py",
        "        check_devices(batch, self._memory.device)\n",
        "",
        (f"{_PAGED}::test_a_tensor_on_another_device_is_refused_before_anything_is_written",),
    ),
    Mutation(
        "kernels-not-looked-at",
        "a kernel that there is not is told before a library is imported",
        "adapters/flashinfer/owner.py",
        'check_kernel("decode_kernel", decode_kernel)',
        "decode_kernel",
        (f"{_MADE}::test_a_wrong_option_is_told_first",),
    ),
    Mutation(
        "library-before-the-shape",
        "arguments in each other's places are told before a library is imported",
        "adapters/flash_attn/fa3.py",
        '        check_shape("FlashAttention 3: shape", shape)\n',
        "",
        (f"{_MADE}::test_arguments_in_each_others_places_are_told_first",),
    ),
    Mutation(
        "trace-overwritten",
        "a command does not write over the file that it reads",
        "commands/outputs.py",
        "            if _same(path, other):",
        "            if False:",
        (f"{_FILES}::test_a_command_does_not_write_over_what_it_reads_or_writes",),
    ),
    Mutation(
        "pipes-replaced",
        "a pipe or device is written into, not replaced",
        "plan_file.py",
        "if target.exists() and not target.is_file():",
        "if False:",
        (f"{_FILES}::test_a_pipe_is_written_into",),
    ),
    Mutation(
        "links-replaced",
        "a link stays one",
        "plan_file.py",
        "target = Path(os.path.realpath(path))",
        "target = Path(os.path.abspath(path))",
        (f"{_FILES}::test_a_link_stays_one",),
    ),
    Mutation(
        "second-value-wins",
        "a name that a line has twice is refused",
        "planning/reading.py",
        "object_pairs_hook=tuple",
        "object_pairs_hook=lambda pairs: tuple(dict(pairs).items())",
        (f"{_TRACES}::test_a_bad_line_is_named",),
    ),
    Mutation(
        "any-number-of-steps",
        "a number of steps is the same as a float",
        "planning/trace.py",
        "    if count > _MOST_STEPS:",
        "    if False:",
        (f"{_TRACES}::test_a_bad_row_is_named", f"{_PLANS}::test_what_is_wrong_is_told_by_name"),
    ),
    Mutation(
        "limits-of-any-size",
        "what graphs take is of a size that can be divided by",
        "planning/work.py",
        "_LEAST_TAKEN, _MOST_TAKEN = 1e-15, 1e15",
        "_LEAST_TAKEN, _MOST_TAKEN = 0.0, math.inf",
        (f"{_PLANS}::test_limits_in_units_out_of_reach_are_refused",),
    ),
    Mutation(
        "plan-of-nothing",
        "a trace without a batch is no plan",
        "commands/plan.py",
        "    if trace.bins:\n",
        "    if True:\n",
        ("tests/unit/test_plan_command.py::test_a_trace_without_a_batch_is_no_plan",),
    ),
    Mutation(
        "reports-of-any-type",
        "a saved report is read with the types that it has",
        "provenance/saved.py",
        "        if type(value) is not kind:",
        "        if False:",
        (f"{_REPORTS}::test_a_report_that_is_changed_anywhere_is_shown_or_refused",),
    ),
    Mutation(
        "methods-by-a-name-of-ours",
        "methods of a pool go by GraphPool",
        "provenance/pool.py",
        '_method.__qualname__ = f"GraphPool.{_method.__name__}"',
        "_method.__qualname__ = _method.__qualname__",
        ("tests/docs/test_reference.py::test_methods_go_by_the_class_that_users_know",),
    ),
)
