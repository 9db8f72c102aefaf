"Draws a figure: what matplotlib makes at its first one is then there in every forked process"

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_figure = Figure(figsize=(4, 3), layout='constrained')
FigureCanvasAgg(_figure)
_ax = _figure.subplots()
_ax.plot([1, 2], [1e-5, 1], 'o-', label='a label')
_ax.set(title='a title', xlabel='x', ylabel='y', yscale='log')  # its ticks are set as formulas
_ax.legend()
_figure.canvas.draw()
