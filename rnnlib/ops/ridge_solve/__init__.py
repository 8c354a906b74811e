from rnnlib.ops.ridge_solve.api import ridge_solve as ridge_solve
from rnnlib.ops.ridge_solve.solvers import LinearSolver as LinearSolver
