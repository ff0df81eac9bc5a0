// Package child is the one protocol between the plugin and the child processes in which NVML runs.
//
// The parent calls [Start] and sends an order as the first line of JSON on the child's standard
// input. The child reads it with [Order] and answers in lines of JSON. The parent keeps standard
// input open as long as it needs the child: a child ends when the pipe is closed, so no child
// outlives its parent.
//
// A process that hangs in the driver cannot be killed. So nothing here waits for a process without
// a limit: [Process.Ended] says that it sends no more messages, and [Process.Gone] that it has
// closed NVML. The package does not know what the messages mean.
package child
