package child

import (
	"time"
)

// MaxStuck is how many child processes may hang in the driver at once. Then no more are started,
// because a process in uninterruptible sleep cannot be killed, and each further one could hang too.
const MaxStuck = 4

// KillLimit is how long to wait until a killed child process ends. It ends within milliseconds
// unless it hangs in the driver.
const KillLimit = 2 * time.Second
