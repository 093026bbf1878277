"""Work of a compiled program, on a text with known numbers."""

import dataclasses

from tests.training.estimate.programs import BUNDLES, LAYERS, TEXT
from training.estimate import hlo, program
from training.estimate.collectives import collectives
from training.estimate.memory import stacked

MODULE = hlo.parse(TEXT)
WORKS = program.works(MODULE, BUNDLES)
MESH = {"data": 1, "fsdp": 2, "context": 2, "tensor": 1}


def work(name: str) -> program.Work:
    return next(each for each in WORKS if each.visit.instruction.name == name)


def test_instructions_of_a_loop_run_as_often_as_its_condition_says():
    assert work("loop").visit.times == 1
    assert work("product.1").visit.times == LAYERS
    assert work("product.1").visit.loops == ("loop",)


def test_a_trip_count_that_depends_on_data_counts_once_and_is_marked():
    text = TEXT.replace("%limit = s32[]{:T(128)} constant(3)", "%limit = s32[]{:T(128)} copy(%at)")
    found = program.works(hlo.parse(text), BUNDLES)
    assert {each.visit.times for each in found} == {1}
    assert any(each.visit.unknown for each in found)


def test_equal_kernels_share_the_bundles_that_are_dumped_once():
    assert work("product.1").bundles == work("product.2").bundles == 500


def test_a_slice_of_a_stack_counts_as_the_slice():
    one_layer = 64 * 128 * 4
    assert work("layer.1").hbm_bytes == 2 * one_layer + 4  # read and written, and an index
    assert work("saved.1").hbm_bytes == 64 * 128 * 2 + 4  # the source is in VMEM


def test_arrays_in_vmem_are_no_hbm_traffic():
    assert work("product.1").hbm_bytes == 0
    assert work("copied").hbm_bytes == 64 * 128 * 2


def test_bytes_follow_from_type_and_shape():
    (array,) = hlo.arrays("bf16[3,64,128]{2,1,0:T(8,128)(2,1)S(1)}")
    assert (array.bytes, array.in_hbm) == (3 * 64 * 128 * 2, False)
    assert [a.bytes for a in hlo.arrays("(f32[], pred[7], s4[3], f8e4m3fn[2])")] == [4, 7, 2, 2]


def test_the_stack_that_a_forward_loop_fills_is_a_saved_activation():
    assert [array.shape for array in stacked(MODULE)] == [(LAYERS, 64, 128)]
    backward = hlo.parse(TEXT.replace('op_name="jit(step)/jvp()/while"', 'op_name="transpose(x)"'))
    assert stacked(backward) == []


def test_collectives_have_kind_axes_bytes_and_what_overlaps():
    reduce, gather = collectives(MODULE, WORKS, MESH)
    assert (reduce.kind, reduce.axes, reduce.ranks) == ("all-reduce", ("fsdp", "context"), 4)
    assert (reduce.asynchronous, reduce.times, reduce.bytes) == (False, LAYERS, 64 * 128 * 4)
    assert (gather.kind, gather.axes, gather.ranks) == ("all-gather", ("context",), 2)
    assert (gather.asynchronous, gather.overlapped) == (True, 500)
    assert (gather.done, gather.bytes) == ("gathered.1", 2 * 64 * 128 * 4)


def test_axes_are_found_in_every_form_of_replica_groups():
    forms = {
        "replica_groups=[2,2]<=[2,2]T(1,0)": ("fsdp",),
        "replica_groups={{0,1},{2,3}}": ("context",),
        "replica_groups={{0,2},{1,3}}": ("fsdp",),
        "replica_groups=[1,4]<=[4]": ("fsdp", "context"),
        "replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_0'}": ("fsdp",),
        "replica_groups={}": ("fsdp", "context"),
    }
    for form, axes in forms.items():
        module = hlo.parse(TEXT.replace("replica_groups=[2,2]<=[4]", form))
        found = collectives(module, program.works(module, BUNDLES), MESH)
        assert found[1].axes == axes, form


def test_a_group_of_one_device_is_no_collective():
    module = hlo.parse(
        TEXT.replace("replica_groups=[2,2]<=[4]", "replica_groups={{0},{1},{2},{3}}")
    )
    found = collectives(module, program.works(module, BUNDLES), MESH)
    assert [each.name for each in found] == ["sum.1"]


def test_records_are_frozen():
    assert all(
        record.__dataclass_params__.frozen
        for record in (hlo.Array, hlo.Instruction, hlo.Module, program.Visit, program.Work)
        if dataclasses.is_dataclass(record)
    )


def test_attributes_may_hold_line_breaks():
    """As those of JAX's attention kernels do, with a line that begins like a computation's end."""
    attributes = 'frontend_attributes={kernel_metadata={\n"xprof_metadata":"{}"\n}}, metadata={'
    found = hlo.parse(TEXT.replace("metadata={", attributes))
    assert found.entry == MODULE.entry
    for name, expected in MODULE.computations.items():
        computation = found.computations[name]
        assert computation.root == expected.root
        assert [(i.name, i.op_name) for i in computation.instructions] == [
            (i.name, i.op_name) for i in expected.instructions
        ]
