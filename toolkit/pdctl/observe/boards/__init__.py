"""The dashboards."""

from pdctl.observe.boards import handles, legs, transfer, turns
from pdctl.observe.panel import Board

BOARDS: tuple[Board, ...] = (turns.BOARD, transfer.BOARD, handles.BOARD, legs.BOARD)
