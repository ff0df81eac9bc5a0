// Package supervisor is the parent process of a node's MPS control daemons. It starts the daemons
// that clients of package mps request, restarts those that end, and removes all their files and
// processes on request.
//
// # Files of a daemon
//
// In the plugin's directory, mps/<ID>/ holds spec.json (the daemon's description and the boot in
// which it was requested), run.json (its process), log/, and what it shares with its clients: pipe/
// and shm/, the shared memory. spec.json is on disk before the first process starts, so after any
// crash the next supervisor knows which daemons should exist. The supervisor discards an unreadable
// spec.json, or one of an earlier boot, with the daemon's directories. No process of such a daemon
// survived, and the plugin requests the daemon again.
//
// Clients can write to pipe/ and shm/. Each of the two is a tmpfs of limited size, so that clients
// cannot fill the node's file systems. The supervisor mounts both before containers bind-mount
// them, and unmounts them when it removes the daemon.
//
// # Life of a daemon
//
// Each daemon has its own goroutine and waits for no other daemon. A daemon is Ready when its
// control pipe answers and the supervisor has set every default and read it back. The supervisor
// restarts a daemon that ends, with the same description in the same directories, because running
// containers have mounted those. The first restart is immediate, the next ones follow after growing
// pauses. It does the same after a first start that fails, until the caller stops the daemon. To
// stop a daemon, the supervisor sends the command quit, then SIGTERM, then SIGKILL. A daemon is
// gone when none of its processes is left, including its servers.
//
// # Processes of a daemon
//
// A control daemon is the supervisor's child and the leader of a session. Its servers are in that
// session, which no process outside can join. run.json names the control daemon by PID and start
// time, so the next supervisor finds servers that are left. The supervisor opens a pidfd before it
// identifies a process, and signals through that pidfd, so it never hits a reused PID.
//
// # End of the supervisor
//
// The daemons end with their supervisor, also after a crash (kill -9): the container runtime ends
// them with the container, and elsewhere the kernel ends each control daemon with its parent. The
// next supervisor ends servers that are left, and starts the daemons again. In a control group
// outside the Pod the daemons could survive. But the kubelet would not count them, and neither an
// eviction of the Pod nor an interrupted uninstallation would end them.
//
// On SIGTERM the supervisor stops all daemons cleanly and keeps their descriptions. SIGTERM means
// that the Pod is being deleted. With updateStrategy OnDelete, only an admin does that. Without the
// clean stop, the kernel would kill the daemons seconds later without a line in their log. Their
// clients lose their server in both cases.
//
// # Limitations
//
// The supervisor knows no claims. It trusts its caller, because only root can open its socket. It
// sets no compute mode. It does not restart a daemon that runs but does not answer, because that
// would end the daemon's clients. The caller gets an error instead.
package supervisor
