package mps

// message is an error with the exact text of the real programs.
type message string

func (m message) Error() string { return string(m) }

const (
	// errRunning is the error of a second daemon in the same pipe directory.
	errRunning = message("An instance of this daemon is already running")
	// errNoDaemon is the real program's only error text when no daemon answers. The real program also
	// prints it if the pipe directory's path is too long for a socket.
	errNoDaemon = message("Cannot find MPS control daemon process")
)
