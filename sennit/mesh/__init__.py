"""The device mesh, its axes and the named collectives over them."""

from sennit.mesh import collectives
from sennit.mesh.axis import Axis
from sennit.mesh.mesh import DIMENSIONS, Mesh, build_mesh, new_axis

__all__ = ["DIMENSIONS", "Axis", "Mesh", "build_mesh", "collectives", "new_axis"]
