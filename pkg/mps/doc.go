// Package mps is what the plugin and the supervisor of MPS control daemons share. [Daemon]
// describes a daemon, [Paths] locates its files, [Edits] makes a container its client, and [Client]
// connects the plugin to the supervisor.
//
// With MPS (CUDA Multi-Process Service) the processes of several containers use one GPU at the same
// time. A control daemon owns a directory with pipes. A CUDA process whose CUDA_MPS_PIPE_DIRECTORY
// names that directory becomes the daemon's client. A CUDA process can name only one directory, so
// one daemon serves all devices that its clients may use.
//
// # Parent process
//
// Clients lose their work when their daemon ends. So a daemon must outlive the plugin, which is
// restarted and upgraded like any Pod. Its parent is the MPS supervisor: a small static program
// with a DaemonSet of its own, which is updated only when an admin deletes its Pods. See package
// [github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/supervisor]. The supervisor starts a daemon in
// milliseconds. A Pod for each daemon would take seconds, depend on the scheduler, and need the
// right to create Pods. The plugin sends JSON to the supervisor over a Unix socket that only root
// can open.
//
// # Promises
//
// [Client.Start] returns when the daemon answers at its control pipe and the supervisor has set
// every requested limit and read it back. Another call with the same daemon changes nothing.
// [Client.Stop] returns when no process and no directory of the daemon is left. The supervisor
// writes the description of a daemon to disk before it starts the daemon, and discards the
// description after a reboot.
//
// # Limitations
//
// Limits of memory and threads apply to each client process, not to a container. A process that
// starts while its daemon is down runs without MPS, as CUDA does wherever no daemon answers. This
// package does not set compute modes or decide who shares a device. It does not protect tenants
// from each other's bugs: clients of one daemon share a server process, and some faults of one
// client end the others.
package mps
