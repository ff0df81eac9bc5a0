// Package schedules puts the plugin's transaction through random schedules of faults, and through every one of a small world.
//
// A schedule is a node's life made of a seed: claims are allocated, prepared and unprepared, by calls that are lost, doubled and given up; instances of the
// plugin are started beside each other and killed; the node loses its power; disks fill up and fail, GPUs fall off the bus and are reset. What runs is the
// real transaction (packages prepare, checkpoint, durable, cdi and lock); the disk, the hardware, the MPS supervisor and the API server are
// played. Every call to one of them is a point at which the schedule decides who goes on, and what goes wrong there: so a fault can meet every step, and a
// seed tells the same story each time.
//
// What must hold is in invariants.go. It is looked at with each answer to the kubelet, whenever nothing is under way, and at the end, when everything works
// again and everything has to be given back.
//
// The explorer (explore.go) does the same without chance, in a world of two claims: every call, ended at every point, in every order.
//
// Time is that of package testing/synctest: nobody waits for it. What is not played is the kernel's part of flocks, and of the CDI directory.
package schedules
