from gateway.memory import lay_out_heap

lay_out_heap()

from gateway.processes.data import main  # noqa: E402

main()
