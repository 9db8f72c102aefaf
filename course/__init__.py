"Support of the notebooks: schematics, the map, predictions, labs. Not part of the wheel"
