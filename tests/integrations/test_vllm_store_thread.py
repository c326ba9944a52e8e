"""The thread that performs an engine's store operations: order, slices, holds, ends."""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st
from vllm_stand_ins import LIMIT_S, busy

from ptstore_mpi import ClosedError
from ptstore_mpi.integrations.vllm import store_thread as module
from ptstore_mpi.integrations.vllm.store_thread import (
    LOAD,
    MATCH,
    NOTE,
    SAVE,
    StoreThread,
    at_once,
)


@pytest.fixture
def thread():
    thread = StoreThread()
    yield thread
    thread.close()


@pytest.fixture
def said():
    return []


def saying(said, name, slices=1):
    """Return work that says in which slice it is."""
    for number in range(slices):
        said.append(name if slices == 1 else f"{name}{number}")
        if number < slices - 1:
            yield
    return name


def ended(thread, *tasks):
    """Wait for the end of tasks."""
    assert thread.wait(list(tasks), LIMIT_S)


def cancelled_aside(thread, task, then=lambda: None):
    """Cancel a task in a thread of its own; return that one once the end is asked for."""

    def cancel():
        thread.cancel([task])
        then()

    canceller = threading.Thread(target=cancel, daemon=True)
    canceller.start()
    assert thread.wait_until(lambda: task.is_unwanted, LIMIT_S)
    return canceller


def test_a_task_returns_what_its_work_returned(thread):
    task = thread.submit(at_once(lambda: 7), SAVE)
    ended(thread, task)
    assert (task.result, task.error, task.is_cancelled) == (7, None, False)


def test_a_task_that_has_not_ended_has_no_result(thread):
    with busy(thread):
        task = thread.submit(at_once(lambda: 7), SAVE)
        assert (task.is_done, task.result) == (False, None)


def test_the_most_urgent_is_first_and_equals_keep_their_order(thread, said):
    order = [(SAVE, "s1"), (NOTE, "n"), (MATCH, "m1"), (SAVE, "s2"), (LOAD, "l"), (MATCH, "m2")]
    with busy(thread):
        tasks = [thread.submit(saying(said, name), urgency) for urgency, name in order]
    ended(thread, *tasks)
    assert said == ["m1", "m2", "l", "s1", "s2", "n"]


def test_what_is_more_urgent_goes_between_two_slices(thread, said):
    matches = []

    def saving():
        for number in range(3):
            said.append(f"save{number}")
            matches.append(thread.submit(saying(said, f"match{number}"), MATCH))
            yield

    ended(thread, thread.submit(saving(), SAVE))
    ended(thread, *matches)
    assert said == ["save0", "match0", "save1", "match1", "save2", "match2"]


def test_equals_take_turns_slice_by_slice(thread, said):
    with busy(thread):
        tasks = [thread.submit(saying(said, name, 3), SAVE) for name in "ab"]
    ended(thread, *tasks)
    assert said == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_held_task_waits_until_it_is_released(thread, said, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_HOLD_S", LIMIT_S)
    held = [thread.submit(saying(said, f"held{n}"), SAVE, hold=True) for n in range(2)]
    ended(thread, thread.submit(saying(said, "note"), NOTE))
    assert said == ["note"]
    assert not any(task.is_done for task in held)
    thread.release_held()
    ended(thread, *held)
    assert said == ["note", "held0", "held1"]
    thread.release_held()  # nothing is held any more


def test_a_held_task_goes_on_by_itself_after_the_longest_hold(thread, said, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_HOLD_S", 0.05)
    started = time.monotonic()
    ended(thread, thread.submit(saying(said, "held"), SAVE, hold=True))
    assert time.monotonic() - started >= 0.05


def test_the_hold_also_ends_while_others_are_performed(thread, said, monkeypatch):
    """Held tasks are looked at before each slice, not only when nothing is to be done."""
    monkeypatch.setattr(module, "LONGEST_HOLD_S", 0.0)
    with busy(thread):
        held = thread.submit(saying(said, "held"), SAVE, hold=True)
        note = thread.submit(saying(said, "note"), NOTE)
    ended(thread, held, note)
    assert said == ["held", "note"]


def test_a_task_cancelled_before_its_start_never_begins(thread, said):
    with busy(thread):
        task = thread.submit(saying(said, "never"), SAVE)
        thread.cancel([task])  # at once: it waits for nobody who is performed yet
    assert (task.is_done, task.is_cancelled, task.result, said) == (True, True, None, [])


def test_a_held_task_can_be_cancelled(thread, said, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_HOLD_S", LIMIT_S)
    task = thread.submit(saying(said, "never"), SAVE, hold=True)
    thread.cancel([task])
    assert (task.is_done, task.is_cancelled, said) == (True, True, [])


def test_cancelling_waits_until_nothing_runs(thread, said):
    """And no slice longer: what is cleaned up on the way out has been, when it returns."""
    begun, go_on = threading.Event(), threading.Event()

    def work():
        try:
            begun.set()
            assert go_on.wait(LIMIT_S)
            said.append("slice")
            yield
            said.append("never")
        finally:
            said.append("closed")

    task = thread.submit(work(), SAVE)
    assert begun.wait(LIMIT_S)
    canceller = cancelled_aside(thread, task, then=lambda: said.append("cancelled"))
    assert said == []
    go_on.set()
    canceller.join(LIMIT_S)
    assert said == ["slice", "closed", "cancelled"]
    assert task.is_done


def test_a_cancelled_task_ends_before_what_is_more_urgent(thread, said):
    """Somebody waits for it: vLLM's next step."""
    with busy(thread):
        match = thread.submit(saying(said, "match"), MATCH)
        save = thread.submit(saying(said, "never"), NOTE)
        canceller = cancelled_aside(thread, save, then=lambda: said.append("cancelled"))
        match_first = thread.submit(at_once(lambda: save.is_done), MATCH)
    ended(thread, match, save, match_first)
    canceller.join(LIMIT_S)
    assert match_first.result
    assert sorted(said) == ["cancelled", "match"]


def test_a_task_that_ends_while_it_is_cancelled_was_not(thread):
    """Its result counts: what was stored is."""
    begun, go_on = threading.Event(), threading.Event()

    def work():
        begun.set()
        assert go_on.wait(LIMIT_S)
        return 7
        yield

    task = thread.submit(work(), SAVE)
    assert begun.wait(LIMIT_S)
    canceller = cancelled_aside(thread, task)
    go_on.set()
    canceller.join(LIMIT_S)
    assert (task.is_done, task.is_cancelled, task.result) == (True, False, 7)


def test_cancelling_what_has_ended_changes_nothing(thread):
    task = thread.submit(at_once(lambda: 7), SAVE)
    ended(thread, task)
    thread.cancel([task])
    assert (task.result, task.is_cancelled) == (7, False)
    thread.cancel([])


def test_errors_surface_where_the_result_is_asked_for(thread):
    def work():
        yield
        raise KeyError("mine")

    task = thread.submit(work(), SAVE)
    ended(thread, task)
    assert task.is_done
    assert isinstance(task.error, KeyError)
    with pytest.raises(KeyError, match="mine"):
        _ = task.result
    after = thread.submit(at_once(lambda: 1), SAVE)
    ended(thread, after)
    assert after.result == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_on_the_way_out_ends_nobody_else():
    thread = StoreThread()
    begun, go_on = threading.Event(), threading.Event()

    def work():
        begun.set()
        assert go_on.wait(LIMIT_S)
        try:
            yield
        finally:
            raise KeyError("mine")

    task = thread.submit(work(), SAVE)
    assert begun.wait(LIMIT_S)
    cancelled_aside(thread, task)
    save = thread.submit(saying([], "save"), SAVE)
    go_on.set()
    assert thread.wait([task, save], 1.0)


def test_closing_ends_everything(said, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_HOLD_S", LIMIT_S)
    thread = StoreThread()
    begun, go_on = threading.Event(), threading.Event()

    def work():
        begun.set()
        assert go_on.wait(LIMIT_S)
        yield
        said.append("never")

    running = thread.submit(work(), SAVE)
    assert begun.wait(LIMIT_S)
    waiting = thread.submit(saying(said, "never"), NOTE)
    held = thread.submit(saying(said, "never"), SAVE, hold=True)
    closer = threading.Thread(target=thread.close)
    closer.start()
    assert thread.wait_until(lambda: held.is_unwanted, LIMIT_S)
    go_on.set()
    closer.join(LIMIT_S)
    assert not closer.is_alive()
    assert all(task.is_done and task.is_cancelled for task in (running, waiting, held))
    assert said == []
    thread.close()
    thread.cancel([running, waiting, held])
    assert thread.wait([running, waiting, held], 0.0)


def test_nothing_can_be_submitted_after_the_end():
    thread = StoreThread()
    thread.close()
    with pytest.raises(ClosedError, match="detached"):
        thread.submit(at_once(lambda: 1), SAVE)


def test_waiting_is_over_at_its_time(thread):
    with busy(thread):
        task = thread.submit(at_once(lambda: 1), MATCH)
        assert thread.wait([task], 0.01) is False
        thread.wait_for_any([task], 0.01)
        assert thread.wait_until(lambda: task.is_done, 0.01) is False
        assert not task.is_done
    ended(thread, task)
    assert thread.wait([], 0.0)
    assert thread.wait([task], 0.0)


def test_waiting_for_any_ends_with_the_first(thread):
    with busy(thread):
        slow = thread.submit(at_once(lambda: 1), NOTE)
        done = thread.submit(at_once(lambda: 2), MATCH)
        waiter = threading.Thread(target=thread.wait_for_any, args=([slow, done], LIMIT_S))
        waiter.start()
        assert waiter.is_alive()
    waiter.join(LIMIT_S)
    assert done.is_done
    ended(thread, slow)


def test_work_that_gets_on_wakes_who_waits_for_it(thread):
    steps, looked = [], threading.Event()

    def work():
        assert looked.wait(LIMIT_S)
        for step in range(3):
            steps.append(step)
            thread.notify()
            yield

    def is_far():
        looked.set()
        return len(steps) > 1

    thread.submit(work(), LOAD)
    assert thread.wait_until(is_far, LIMIT_S)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(MATCH, NOTE), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 12)),
        st.tuples(st.just("release")),
    ),
    max_size=20,
)


@given(OPERATIONS)
def test_any_sequence_ends_each_task_once_and_in_order(operations):
    """Nothing of a cancelled task runs after `cancel`; nobody else loses a slice."""
    said, tasks, slices, gone = [], [], {}, set()
    thread = StoreThread()
    try:
        for operation, *arguments in operations:
            if operation == "submit":
                urgency, count, hold = arguments
                name = len(tasks)
                slices[name] = count
                work = saying(said, (name,), count) if count == 1 else _steps(said, name, count)
                tasks.append(thread.submit(work, urgency, hold=hold))
            elif operation == "cancel" and arguments[0] < len(tasks):
                task = tasks[arguments[0]]
                thread.cancel([task])
                assert task.is_done
                if task.is_cancelled:
                    gone.add(arguments[0])
                    so_far = list(said)
                    gone_steps = [each for each in so_far if each[0] == arguments[0]]
                    slices[arguments[0]] = len(gone_steps)
            elif operation == "release":
                thread.release_held()
        thread.release_held()
        ended(thread, *tasks)
    finally:
        thread.close()
    for name, count in slices.items():
        assert len([each for each in said if each[0] == name]) == count
        assert (tasks[name].result is None) == (name in gone)
        assert tasks[name].is_cancelled == (name in gone)


def _steps(said, name, count):
    for number in range(count):
        said.append((name, number))
        if number < count - 1:
            yield
    return name
