# SPDX-License-Identifier: Apache-2.0
"""What people ask for in loose values, on a command line, in a file of requests or in a DAG, answered by the pure core.

The edge of that core: files and, where it is wished, the hub are read here. All problems of a request come at once.
"""
