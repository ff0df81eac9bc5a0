// Package schedules runs the plugin's transaction (Prepare and Unprepare with everything that they
// change) through random schedules of faults. It also runs it through every schedule of a very
// small node. This is deterministic simulation.
//
// A schedule is the life of a node, derived from a seed. Claims are allocated, prepared and
// unprepared. The kubelet's calls get lost, repeated and canceled. Instances of the plugin run side
// by side and are killed. The node loses power, disks fill up and fail, GPUs fall off the bus and
// are reset.
//
// The transaction is the real one: packages prepare, checkpoint, durable, cdi and lock. The disk,
// the hardware, the MPS supervisor and the API server are simulated. Every call to one of them is a
// fault point: there the schedule decides which call continues and which fault interrupts it. So
// every fault can interrupt every step, and a seed always gives the same run.
//
// invariants.go lists what must hold. The schedules check that with each answer to the kubelet,
// whenever no call is in flight, and at the end, when everything works again and every claim is
// unprepared.
//
// The explorer (explore.go) uses no random numbers. On a node with two claims it tries every call,
// interrupted at every fault point, in every order.
//
// Time is that of package testing/synctest, so no test waits for real time. The kernel's part of
// flocks and of the CDI directory is real, not simulated.
package schedules
