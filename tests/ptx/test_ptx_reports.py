"""The faults that the PTX interpreter reports, each in a kernel of a few lines."""

import numpy as np
import ptx_run
import pytest
from ptx_run import LaunchError, aligned, kernel, launch

pytestmark = pytest.mark.exhaustive  # a minute of the compiler, and they test the instrument


@pytest.fixture(autouse=True)
def _options():
    ptx_run.set_options(races=2)
    yield
    ptx_run.set_options()


# Every lane's own place in %rd4, of 4 bytes.
MINE = """
mad.lo.u32 %r6, %block, 32, %tid;
mul.wide.u32 %rd3, %r6, 4;
add.u64 %rd4, %rd0, %rd3;
"""
SHARED = ".shared .align 16 .b8 memory[128];"
SHARED_MINE = "mov.u32 %r5, memory;\nshl.b32 %r4, %tid, 2;\nadd.u32 %r5, %r5, %r4;\n"


def report(body, *, variables="", array=None, **options):
    """The text of the fault that a kernel ends with."""
    made = kernel(body, variables=variables)
    with pytest.raises(LaunchError) as caught:
        launch(made, aligned(64, np.uint32) if array is None else array, **options)
    text = str(caught.value)
    assert text.startswith("kernel kernel: ")
    assert "\n" not in text
    return text


def test_a_read_outside_of_every_allocation():
    text = report("ld.global.u32 %r1, [%rd0+256];")
    assert "thread 0 of block 0 reads 4 bytes" in text
    assert "outside of the allocation" in text or "outside of every allocation" in text
    assert "`ld.global.u32 %r1, [%rd0+256]`" in text


def test_a_load_may_take_the_rest_of_16_bytes_and_a_store_may_not():
    array = aligned(61, np.uint32)
    load = "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd0+240];"
    launch(kernel(load), array)
    store = "mov.u32 %r1, 0;\nst.global.v4.u32 [%rd0+240], {%r1, %r1, %r1, %r1};"
    assert "writes 16 bytes" in report(store, array=array)
    assert "reads 16 bytes" in report(load.replace("240", "256"), array=array)


def test_memory_that_was_freed():
    array = aligned(64, np.uint32)
    made = kernel("ld.global.u32 %r1, [%rd0];")
    launch(made, array)
    with pytest.raises(LaunchError, match="outside"):
        launch(made, array.ctypes.data)


def test_an_address_that_is_not_aligned():
    assert "not aligned to 8 bytes" in report("ld.global.u64 %rd1, [%rd0+4];")


def test_an_address_of_another_space():
    generic = "mov.u64 %rd1, memory;\ncvta.shared.u64 %rd1, %rd1;\n"
    assert "in another space" in report(generic + "ld.global.u32 %r1, [%rd1];", variables=SHARED)
    assert "of another space" in report("cvta.to.shared.u64 %rd1, %rd0;")
    launch(kernel(generic + "st.u32 [%rd1], 1;", variables=SHARED), aligned(1, "u4"), threads=1)


def test_shared_memory_beyond_its_size():
    assert "byte 128 of shared memory of 128 bytes" in report(
        "mov.u32 %r5, memory;\nst.shared.u32 [%r5+128], 1;", variables=SHARED
    )


def test_a_write_and_a_read_of_shared_memory_without_a_barrier():
    body = f"{SHARED_MINE}st.shared.u32 [%r5], %tid;\nBARRIER\nmov.u32 %r5, memory;\n"
    body += "ld.shared.u32 %r1, [%r5];"
    assert "reads shared memory in a race with the write by thread 0 of block 0" in report(
        body.replace("BARRIER", ""), variables=SHARED
    )
    for barrier in ("bar.sync 0;", "bar.warp.sync -1;"):
        launch(kernel(body.replace("BARRIER", barrier), variables=SHARED), aligned(1, "u4"))


def test_a_read_and_a_write_of_shared_memory_without_a_barrier():
    body = f"{SHARED_MINE}st.shared.u32 [%r5], %tid;\nbar.sync 0;\nmov.u32 %r5, memory;\n"
    body += "ld.shared.u32 %r1, [%r5];\nBARRIER\nsetp.eq.u32 %p1, %tid, 3;\n"
    body += "@%p1 st.shared.u32 [%r5], %tid;"
    assert "in a race with a read" in report(body.replace("BARRIER", ""), variables=SHARED)
    launch(kernel(body.replace("BARRIER", "bar.sync 0;"), variables=SHARED), aligned(1, "u4"))


def test_a_barrier_of_a_warp_orders_no_other_warp():
    body = f"{SHARED_MINE}st.shared.u32 [%r5], %tid;\nbar.warp.sync -1;\n"
    body += "ld.shared.u32 %r1, [memory];"
    variables = SHARED.replace("128", "256")
    assert "race" in report(body, variables=variables, threads=64)


def test_an_exchange_of_lanes_orders_no_memory():
    body = f"{SHARED_MINE}st.shared.u32 [%r5], %tid;\n"
    body += "shfl.sync.bfly.b32 %r1, %tid, 1, 31, -1;\nld.shared.u32 %r1, [memory];"
    assert "race" in report(body, variables=SHARED)


def test_two_writes_of_one_place():
    body = "st.shared.u32 [memory], %tid;"
    assert "writes shared memory in a race with the write" in report(body, variables=SHARED)
    same = "mov.u32 %r1, 7;\nst.shared.u32 [memory], %r1;"  # lanes that share a number
    launch(kernel(same, variables=SHARED), aligned(1, "u4"))


# The last block to count reads what all blocks have written.
COUNTED = """
st.global.u32 [%rd4], %tid;
BARRIER
setp.eq.u32 %p1, %tid, 0;
@!%p1 bra done;
FENCE
atom.global.add.u32 %r2, [%rd0+1024], 1;
AFTER
setp.eq.u32 %p2, %r2, 3;
@%p2 ld.global.u32 %r3, [%rd0+4];
@%p2 ld.global.u32 %r3, [%rd0+132];
@%p2 ld.global.u32 %r3, [%rd0+260];
@%p2 ld.global.u32 %r3, [%rd0+388];
done:
"""


def counted(barrier="bar.sync 0;", fence="membar.gl;", after="membar.gl;"):
    body = COUNTED.replace("BARRIER", barrier).replace("FENCE", fence).replace("AFTER", after)
    return MINE + body


def test_blocks_that_count_their_arrival():
    launch(kernel(counted()), aligned(257, np.uint32), blocks=4)
    assert "counts without a fence" in report(counted(fence=""), array=aligned(257, "u4"), blocks=4)
    assert "reads global memory in a race" in report(
        counted(barrier=""), array=aligned(257, "u4"), blocks=4
    )
    assert "reads global memory in a race" in report(
        counted(after=""), array=aligned(257, "u4"), blocks=4
    )


def test_blocks_that_write_one_place():
    assert "writes global memory in a race" in report("st.global.u32 [%rd0], %block;", blocks=2)


def test_memory_of_ld_global_nc_that_is_written():
    body = MINE + "ld.global.nc.u32 %r1, [%rd4];\nst.global.u32 [%rd4], %r1;"
    assert "that this kernel reads by ld.global.nc" in report(body)
    body = MINE + "st.global.u32 [%rd4], 1;\nld.global.nc.u32 %r1, [%rd4];"
    assert "by ld.global.nc what this kernel wrote" in report(body)


def test_a_value_that_nobody_wrote():
    use = "takes a value that nobody wrote, of %"
    assert use + "p1, as a branch" in report("@%p1 bra end;\nend:")
    assert use + "rd2, as an address" in report("ld.global.u32 %r1, [%rd2];")
    assert use + "r1, as what reaches global memory" in report("st.global.u32 [%rd0], %r1;")
    assert use + "p1, as a vote" in report("vote.sync.any.pred %p2, %p1, -1;")
    # The value may be copied and used in a result that is never read.
    launch(kernel("add.u32 %r2, %r1, 1;\nmov.u32 %r3, %r2;"), aligned(1, "u4"))


def test_a_value_of_shared_memory_that_nobody_wrote():
    body = f"{SHARED_MINE}ld.shared.u32 %r1, [%r5];\n{MINE}st.global.u32 [%rd4], %r1;"
    assert "takes a value that nobody wrote" in report(body, variables=SHARED)


def test_a_value_that_some_lanes_lack():
    body = f"setp.lt.u32 %p1, %tid, 31;\n@%p1 mov.u32 %r1, 1;\n{MINE}st.global.u32 [%rd4], %r1;"
    assert "thread 31 of block 0" in report(body)


def test_a_choice_that_takes_no_undefined_value():
    body = f"setp.lt.u32 %p1, %tid, 40;\nselp.b32 %r1, %tid, %r2, %p1;\n{MINE}"
    launch(kernel(body + "st.global.u32 [%rd4], %r1;"), aligned(32, np.uint32))
    body = "setp.lt.u32 %p1, %tid, 0;\nand.pred %p2, %p1, %p3;\n@%p2 bra end;\nend:"
    launch(kernel(body), aligned(1, "u4"))


def test_masks_of_lanes():
    assert "names other lanes, and not itself" in report("bar.warp.sync 6;", threads=32)
    assert "names lanes that its warp lacks" in report("bar.warp.sync -1;", threads=16)
    body = "setp.eq.u32 %p1, %tid, 5;\n@%p1 exit;\nvote.sync.any.pred %p2, %p1, -1;"
    assert "names a lane that has ended" in report(body)
    body = "setp.eq.u32 %p1, %tid, 5;\nselp.b32 %r1, 32, -1, %p1;\nbar.warp.sync %r1;"
    assert "names other lanes than those that it meets" in report(body)


def test_lanes_that_never_come():
    body = "setp.eq.u32 %p1, %tid, 5;\n@%p1 bra wait;\nbar.warp.sync -1;\nbra end;\nwait:\n"
    body += "bar.sync 0;\nend:"
    assert "threads wait for others that never come: lanes 0xffffffdf of warp 0" in report(body)


def test_lanes_at_two_barriers():
    body = "setp.lt.u32 %p1, %tid, 5;\n@%p1 bra other;\nbar.sync 0;\nbra end;\nother:\n"
    body += "bar.sync 0;\nend:"
    assert "other lanes of its warp are at another one" in report(body)


ARRIVE, WAIT = "barrier.cluster.arrive.release;\n", "barrier.cluster.wait.acquire;\n"
READ_OTHER = """
mov.u32 %r1, %cluster_ctarank;
xor.b32 %r1, %r1, 1;
mov.u64 %rd1, memory;
cvta.shared.u64 %rd1, %rd1;
mapa.u64 %rd1, %rd1, %r1;
ld.u32 %r2, [%rd1];
"""


def test_a_cluster_that_shares_memory():
    write = "setp.eq.u32 %p1, %tid, 0;\n@%p1 st.shared.u32 [memory], 3;\n"
    whole = write + ARRIVE + WAIT + READ_OTHER + ARRIVE + WAIT
    options = {"blocks": 4, "of_cluster": 2}
    launch(kernel(whole, variables=SHARED), aligned(1, "u4"), **options)
    early = report(write + ARRIVE + WAIT + READ_OTHER, variables=SHARED, **options)
    assert "has ended" in early or "may end while its cluster still reads" in early
    assert "race" in report(write + READ_OTHER + ARRIVE + WAIT, variables=SHARED, **options)
    wrong = whole.replace("xor.b32 %r1, %r1, 1", "mov.u32 %r1, 2")
    assert "maps to rank 2 of a cluster of 2" in report(wrong, variables=SHARED, **options)


def test_a_barrier_of_a_cluster_in_the_wrong_order():
    assert "arrives twice" in report(ARRIVE + ARRIVE)
    assert "without an arrival" in report(WAIT)


def test_a_copy_that_is_not_waited_for():
    body = f"{SHARED_MINE}{MINE}cp.async.ca.shared.global [%r5], [%rd4], 4;\n"
    body += "cp.async.commit_group;\nWAIT\nld.shared.u32 %r1, [%r5];\nst.global.u32 [%rd4], %r1;"
    array = aligned(32, np.uint32, np.arange(32))
    for wait in ("cp.async.wait_group 0;", "cp.async.wait_all;"):
        launch(kernel(body.replace("WAIT", wait), variables=SHARED), array)
        assert np.array_equal(array, np.arange(32))
    assert "that nobody wrote" in report(body.replace("WAIT", ""), variables=SHARED, array=array)
    late = body.replace("WAIT", "cp.async.wait_group 1;")
    assert "that nobody wrote" in report(late, variables=SHARED, array=array)


PASS = "mbarrier.try_wait.parity.shared::cta.b64 %p2, [full], 0;\n"
WAIT_FOR_COPY = f"again:\n{PASS}@!%p2 bra again;\n"
FENCE_OF_COPIES = "@%p1 fence.mbarrier_init.release.cluster;\n"
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 128;\n"
COPY = """@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
  [memory], [%rd0], 128, [full];
"""
READ = "ld.shared.u32 %r1, [%r5];\n"
COPIED = f"""{SHARED_MINE}{MINE}setp.eq.u32 %p1, %tid, 0;
@%p1 mbarrier.init.shared::cta.b64 [full], 1;
{FENCE_OF_COPIES}bar.sync 0;
{EXPECT}{COPY}{WAIT_FOR_COPY}{READ}add.u32 %r1, %r1, 1;
st.global.u32 [%rd4], %r1;
"""
WITH_BARRIER = f"{SHARED}\n.shared .align 8 .b8 full[8];"
ONE_WAITS = f"@!%p1 bra others;\n{WAIT_FOR_COPY}others:\n"
STORE = "st.shared.u32 [%r5], %tid;\nFENCE\nbar.sync 0;\n"
BULK_FAULTS = {
    "no wait": (WAIT_FOR_COPY, "", "in a race with the bulk copy that thread 0"),
    "no second try": (WAIT_FOR_COPY, PASS, "in a race with the bulk copy"),
    "another parity": ("[full], 0", "[full], 1", "in a race with the bulk copy"),
    "only one waits": (WAIT_FOR_COPY, ONE_WAITS, "in a race with the bulk copy"),
    "no initialisation": ("@%p1 mbarrier.init", "@%p2 mbarrier.init", "nobody initialised"),
    "no fence": (FENCE_OF_COPIES, "", "that no fence has published"),
    "no barrier": ("bar.sync 0;", "", "reads shared memory in a race"),
    "no arrival": (EXPECT, "", "threads wait for others that never come"),
    "fewer bytes": ("_, [full], 128", "_, [full], 64", "threads wait for others that never come"),
    "two arrivals": (EXPECT, EXPECT + EXPECT, "arrives once too often"),
    "half a vector": ("[%rd0], 128", "[%rd0], 8", "copies 8 bytes at once"),
    "not aligned": ("[memory], [%rd0]", "[memory], [%rd0+4]", "not aligned to 16 bytes"),
    "outside": ("[memory], [%rd0]", "[memory], [%rd0+2048]", "outside"),
    "copied again while some read": (READ, READ + EXPECT + COPY, "in a race with a read"),
    "a copy at the end": (READ, READ + "bar.sync 0;\n" + EXPECT + COPY, "ends while a bulk copy"),
    "over a store": (EXPECT, STORE.replace("FENCE", "") + EXPECT, "copies over a store without"),
}


@pytest.mark.parametrize("is_random", [False, True])
def test_a_bulk_copy(is_random):
    ptx_run.set_options(is_random=is_random, races=2)
    synced = ONE_WAITS + "bar.warp.sync -1;\n"
    stored = STORE.replace("FENCE", "fence.proxy.async.shared::cta;") + EXPECT
    for old, new in (("", ""), (WAIT_FOR_COPY, synced), (EXPECT, stored)):
        array = aligned(32, np.uint32, np.arange(32))
        launch(kernel(COPIED.replace(old, new, 1), variables=WITH_BARRIER), array)
        assert np.array_equal(array, np.arange(1, 33))


@pytest.mark.parametrize("fault", BULK_FAULTS)
def test_a_bulk_copy_with_a_fault(fault):
    old, new, said = BULK_FAULTS[fault]
    body = f"setp.ne.u32 %p2, 0, 0;\n{COPIED.replace(old, new, 1)}"
    assert said in report(body, variables=WITH_BARRIER)


def test_an_instruction_that_is_not_known():
    with pytest.raises(LaunchError, match=r"text.ptx:\d+: unknown instruction sin.approx.f32"):
        kernel("sin.approx.f32 %f1, %f2;")


@pytest.mark.parametrize("is_random", [False, True])
def test_lanes_that_part_meet_again(is_random):
    ptx_run.set_options(is_random=is_random, races=2)
    body = f"""
    mov.u32 %r1, 0;
    mov.u32 %r2, 0;
    loop:
    add.u32 %r1, %r1, %r2;
    add.u32 %r2, %r2, 1;
    setp.le.u32 %p1, %r2, %tid;
    @%p1 bra loop;
    bar.warp.sync -1;
    shfl.sync.idx.b32 %r3, %r1, 31, 31, -1;
    {MINE}
    sub.u32 %r1, %r3, %r1;
    st.global.u32 [%rd4], %r1;
    """
    array = aligned(32, np.uint32)
    launch(kernel(body), array)
    sums = np.array([n * (n + 1) // 2 for n in range(32)])
    assert np.array_equal(array, sums[31] - sums)


def test_a_function_is_called():
    text = """
    .func (.param .b32 returned) twice(.param .b32 given) {
      .reg .b32 %r<4>;
      ld.param.b32 %r1, [given];
      add.u32 %r2, %r1, %r1;
      st.param.b32 [returned], %r2;
      ret;
    }
    .visible .entry kernel(.param .u64 p0) {
      .reg .b32 %r<4>;
      .reg .b64 %rd<4>;
      .reg .pred %p<2>;
      ld.param.u64 %rd0, [p0];
      mov.u32 %r0, %tid.x;
      mul.wide.u32 %rd1, %r0, 4;
      add.u64 %rd1, %rd0, %rd1;
      setp.lt.u32 %p1, %r0, 7;
      mov.u32 %r1, 0;
      @%p1 bra end;
      { .param .b32 param0; .param .b32 value;
        st.param.b32 [param0], %r0;
        call.uni (value), twice, (param0);
        ld.param.b32 %r1, [value];
      }
      end:
      st.global.u32 [%rd1], %r1;
      ret;
    }
    """
    array = aligned(32, np.uint32)
    launch(ptx_run.load(text), array)
    lanes = np.arange(32)
    assert np.array_equal(array, np.where(lanes < 7, 0, 2 * lanes))


def test_an_exchange_orders_reads_before_writes_of_the_warp():
    body = f"{SHARED_MINE}st.shared.u32 [%r5], %tid;\nbar.warp.sync -1;\n"
    body += "ld.shared.u32 %r1, [memory];\n"
    body += "EXCHANGE\nsetp.eq.u32 %p1, %tid, 0;\n@%p1 ld.shared.u32 %r2, [memory];\n"
    body += "@%p1 st.shared.u32 [memory], 7;"
    assert "race with a read" in report(body.replace("EXCHANGE", ""), variables=SHARED)
    exchange = "shfl.sync.bfly.b32 %r3, %r1, 1, 31, -1;"
    launch(kernel(body.replace("EXCHANGE", exchange), variables=SHARED), aligned(1, "u4"))


def test_what_all_blocks_read_and_the_last_one_writes():
    body = counted().replace("st.global.u32 [%rd4], %tid;", "ld.global.u32 %r4, [%rd0];")
    body = body.replace("@%p2 ld.global.u32 %r3, [%rd0+4];", "@%p2 st.global.u32 [%rd0], %r2;")
    launch(kernel(body), aligned(257, np.uint32), blocks=4)
    early = body.replace("bar.sync 0;", "")
    assert "race with a read" in report(early, array=aligned(257, "u4"), blocks=4)
