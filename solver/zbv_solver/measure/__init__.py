"""From the traces of ranks to the costs that they measured.

Reading a trace and refitting a problem are here. Explaining a measured step is a part of the service.
"""
