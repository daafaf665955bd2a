"""KV blocks: finite, and empty once they are freed."""

from __future__ import annotations

from baton.sim.pool import GONE, Pool


def test_blocks_come_to_an_end_and_come_back() -> None:
    pool = Pool(3)
    first = pool.take(2)
    assert first is not None
    assert pool.take(2) is None
    assert (pool.used, pool.free) == (2, 1)
    pool.give_back(first)
    assert pool.take(3) is not None


def test_a_freed_block_holds_nothing_of_its_old_owner() -> None:
    pool = Pool(2)
    blocks = pool.take(2) or []
    pool.write(blocks, [b"a" * 16, b"b" * 16])
    assert pool.read(blocks[1]) == b"b" * 16
    pool.give_back(blocks)
    assert pool.read(blocks[1]) == GONE
    again = pool.take(1) or []
    assert pool.read(again[0]) == b""


def test_blocks_that_a_fault_holds_back_are_nobodys() -> None:
    pool = Pool(4)
    pool.held_back = 4
    assert pool.take(1) is None
    pool.held_back = 0
    assert pool.take(4) is not None


def test_the_prefix_cache_knows_a_prompts_start_and_forgets_the_oldest() -> None:
    pool = Pool(10, cached=2)
    pool.write(pool.take(2) or [], [b"1", b"2"])
    assert pool.known([b"1", b"2", b"3"]) == 2
    pool.write(pool.take(1) or [], [b"3"])
    assert pool.known([b"1", b"2"]) == 0
    assert pool.known([b"2", b"3"]) == 2
