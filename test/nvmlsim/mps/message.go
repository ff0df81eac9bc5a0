package mps

// message is an error in the words of the real programs, which are sentences.
type message string

func (m message) Error() string { return string(m) }

const (
	// errRunning is how a second daemon on one pipe directory ends.
	errRunning = message("An instance of this daemon is already running")
	// errNoDaemon is all that the real program says where it finds no daemon, and where the pipe directory's path is too long for a socket.
	errNoDaemon = message("Cannot find MPS control daemon process")
)
