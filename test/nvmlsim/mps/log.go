package mps

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// logger writes log lines in the real programs' format: time, role, PID and text.
type logger struct {
	mutex sync.Mutex
	to    io.Writer
	role  string
}

func (l *logger) printf(format string, args ...any) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	_, _ = fmt.Fprintf(
		l.to,
		"[%s %s %5d] %s\n",
		time.Now().Format("2006-01-02 15:04:05.000"),
		l.role,
		os.Getpid(),
		fmt.Sprintf(format, args...),
	)
}

// openLog opens a file in the log directory for appending.
func openLog(name string) (*os.File, error) {
	folder := folderOf(logsVariable, defaultLogs)
	if err := makeFolder(folder, 0o700); err != nil {
		return nil, err
	}
	return os.OpenFile(filepath.Join(folder, name), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
}
