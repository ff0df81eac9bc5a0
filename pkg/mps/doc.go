// Package mps is what the plugin and the supervisor of MPS control daemons agree on: what a daemon is asked to be ([Daemon]), where its files are
// ([Paths]), what a container needs to be its client ([Edits]), and how the plugin asks for one ([Client]).
//
// MPS (CUDA Multi-Process Service) lets the processes of several containers use one GPU at the same time. A control daemon owns a directory with pipes;
// a CUDA process that finds CUDA_MPS_PIPE_DIRECTORY becomes its client. A CUDA process knows one such directory only, so a daemon spans all the devices
// that its clients may use.
//
// # Whose children the daemons are
//
// Clients lose their work when their daemon ends, so a daemon must outlive the plugin, which is restarted and upgraded like any Pod. Package
// [github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/supervisor] is the parent: a small static program in a DaemonSet of its own that is updated only
// when its Pods are deleted. It starts a daemon in milliseconds, on the node alone, where a Pod for each daemon would take seconds, the scheduler, and
// the right to create Pods. The plugin speaks to it by JSON over a Unix socket that only root can open.
//
// # What is promised
//
// [Client.Start] returns when the daemon answers at its control pipe and every limit that was asked for has been set and read back; called again with
// the same daemon it changes nothing. [Client.Stop] returns when no process and no directory of the daemon is left. What a daemon should be is on the
// disk before it starts; a boot forgets it.
//
// # What is not
//
// Limits of memory and threads hold for each client process, not for a container. A process that starts while its daemon is down runs without MPS, as
// CUDA does wherever no daemon answers. Nothing here sets compute modes, decides who shares, or protects tenants from each other's bugs: clients of one
// daemon share a server process, and some faults of one end the others.
package mps
