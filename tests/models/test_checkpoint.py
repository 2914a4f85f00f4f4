import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from models import checkpoint


def tree():
    return {
        "layers": [{"w": np.arange(32.0, dtype=np.float32).reshape(8, 4)} for _ in range(2)],
        "half": jnp.arange(8, dtype=jnp.bfloat16),
        "step": 7,
    }


def mesh(num_devices):
    devices = jax.devices()[:num_devices]
    return jax.make_mesh((num_devices,), ("data",), (AxisType.Auto,), devices=devices)


def test_round_trip_to_numpy_and_to_one_device(tmp_path):
    checkpoint.save(tmp_path / "c", tree())
    back = checkpoint.restore(tmp_path / "c")
    assert isinstance(back["layers"], list) and back["step"] == 7
    assert isinstance(back["half"], np.ndarray) and back["half"].dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, back, tree())
    placed = checkpoint.restore(tmp_path / "c", shardings=SingleDeviceSharding(jax.devices()[3]))
    assert placed["half"].devices() == {jax.devices()[3]}
    jax.tree.map(np.testing.assert_array_equal, placed, tree())


@pytest.mark.parametrize(("saved_on", "restored_on"), [(4, 2), (1, 8), (8, 1)])
def test_across_device_counts(saved_on, restored_on, tmp_path):
    def rows(n):
        return NamedSharding(mesh(n), PartitionSpec("data"))

    x = {"w": jax.device_put(np.arange(64.0).reshape(16, 4), rows(saved_on))}
    checkpoint.save(tmp_path / "c", x)
    like = {"w": jax.ShapeDtypeStruct((16, 4), x["w"].dtype)}
    back = checkpoint.restore(tmp_path / "c", like, {"w": rows(restored_on)})
    assert len(back["w"].addressable_shards) == restored_on
    assert back["w"].addressable_shards[0].data.shape == (16 // restored_on, 4)
    np.testing.assert_array_equal(back["w"], x["w"])


def test_errors_and_overwrite(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a folder"):
        checkpoint.restore(tmp_path / "c")
    checkpoint.save(tmp_path / "c", {"w": np.ones(3)})
    with pytest.raises(ValueError, match="exists; pass overwrite=True"):
        checkpoint.save(tmp_path / "c", {"w": np.ones(3)})
    checkpoint.save(tmp_path / "c", {"w": np.ones(4)}, overwrite=True)
    assert checkpoint.restore(tmp_path / "c")["w"].shape == (4,)
    with pytest.raises(ValueError, match=r"float64\[4\].* float64\[5\] was asked"):
        checkpoint.restore(tmp_path / "c", {"w": np.ones(5)})
    with pytest.raises(ValueError, match="cannot be restored"):
        checkpoint.restore(tmp_path / "c", {"v": np.ones(4)})
    for file in (tmp_path / "c").rglob("*"):
        if file.is_file():
            file.write_bytes(b"?")
    with pytest.raises(ValueError, match="cannot be restored, it is damaged"):
        checkpoint.restore(tmp_path / "c")
