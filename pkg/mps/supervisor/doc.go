// Package supervisor is the parent of a node's MPS control daemons: it starts what package mps asks for, keeps it running, and takes it away without a trace.
//
// # A daemon's files
//
// Below the plugin's directory, mps/<ID>/ holds spec.json (what the daemon should be, and the boot it is for), run.json (which process it is), pipe/ (shared
// with its clients) and log/. Its shared memory is <shm root>/gpu-dra-driver-mps/<ID>. The specification is on the disk before the first process is started,
// so whatever is killed when, the next supervisor knows what there should be. A specification of an earlier boot, or one that cannot be read, is forgotten
// with its directories: nothing of the daemon survived, and whoever needs it asks again.
//
// The two that clients write to, pipe/ and the shared memory, are file systems of their own (tmpfs), so that nobody fills more of the node than that. They are
// mounted where the node's containers are given them, and go with the daemon.
//
// # A daemon's life
//
// Each has a goroutine of its own and waits for no other. It is Ready when its control pipe answers and every default has been set and read back. One that
// ends is started again with the same specification and in the same directories, which running containers hold, at first at once and then more and more
// rarely. A first start that fails leaves nothing. A daemon is told to quit, then terminated, then killed; it is gone when no process is left, of its
// servers neither.
//
// # Whose processes are touched
//
// Every process of a daemon carries the name of its directory in its environment, and is in the control groups in which its supervisor started it; servers
// inherit both. A process of another container that carries the same name is nobody's business: it is not signalled, nor waited for. Signals go to a process through a descriptor that
// was opened before the process was recognised, so a number that was given anew hits nobody else.
//
// # When the supervisor ends
//
// After a crash (kill -9) daemons that still run are adopted: clients notice nothing. In a Pod the container runtime ends them with the container, and the
// next supervisor starts them again. On SIGTERM it ends all daemons in order and keeps their specifications: the Pod is being deleted (which the DaemonSet's
// updateStrategy OnDelete leaves to the admin), so they would be killed seconds later anyway, in the middle of their clients' work and without a word in
// their log. Processes that started as clients have lost their server then, in both cases.
//
// # What it does not do
//
// It knows no claims, and trusts its only caller, who can open a socket of root's. It sets no compute mode. It restarts no daemon that runs but does not
// answer, because that would end its clients: the caller is told when it asks.
package supervisor
