package mps

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

const (
	defaultPipes = "/tmp/nvidia-mps"
	defaultLogs  = "/var/log/nvidia-mps"

	pipesVariable   = "CUDA_MPS_PIPE_DIRECTORY"
	logsVariable    = "CUDA_MPS_LOG_DIRECTORY"
	threadsVariable = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
	memoryVariable  = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
	devicesVariable = "CUDA_VISIBLE_DEVICES"

	controlSocket    = "control"
	privilegedSocket = "control_privileged"
	lockFile         = "control_lock"
	pidFile          = "nvidia-cuda-mps-control.pid"
	logPipe          = "log"
	controlLog       = "control.log"
	serverLog        = "server.log"
)

// pipes returns the path of the pipe directory.
func pipes() string { return folderOf(pipesVariable, defaultPipes) }

func folderOf(variable, otherwise string) string {
	folder := os.Getenv(variable)
	if folder == "" {
		folder = otherwise
	}
	if absolute, err := filepath.Abs(folder); err == nil {
		return absolute
	}
	return folder
}

// makeFolder creates a folder, but not the folders above it.
func makeFolder(folder string, mode os.FileMode) error {
	if err := os.Mkdir(folder, mode); err != nil && !os.IsExist(err) {
		return err
	}
	return nil
}

// parseThreads parses a thread percentage above 0 and up to 100.
func parseThreads(text string) (float64, error) {
	value, err := strconv.ParseFloat(text, 64)
	if err != nil || !(value > 0 && value <= 100) {
		return 0, fmt.Errorf("%q is no percentage above 0 and up to 100", text)
	}
	return value, nil
}

func formatThreads(value float64) string { return strconv.FormatFloat(value, 'f', 1, 64) }

// parseMemory parses a memory limit such as 900M or 10G, and returns it in MiB.
func parseMemory(text string) (uint64, error) {
	number, unit := text, ""
	if n := len(text); n > 0 {
		number, unit = text[:n-1], text[n-1:]
	}
	value, err := strconv.ParseUint(number, 10, 40)
	switch {
	case err != nil || value == 0:
		return 0, fmt.Errorf("%q is no memory limit such as 900M or 10G", text)
	case unit == "G":
		return value << 10, nil
	case unit == "M":
		return value, nil
	}
	return 0, fmt.Errorf("%q is no memory limit such as 900M or 10G", text)
}

// maxOrdinals is the number of devices for which the commands can set memory limits.
const maxOrdinals = 32

// readMemory parses a memory limit like the real control program: digits, and then G for GiB or
// anything else for MiB. It ignores the rest. Without digits it returns 0, which means no limit.
func readMemory(text string) uint64 {
	digits := len(text) - len(strings.TrimLeft(text, "0123456789"))
	value, err := strconv.ParseUint(text[:digits], 10, 40)
	if err != nil {
		return 0
	}
	if rest := text[digits:]; rest != "" && (rest[0] == 'G' || rest[0] == 'g') {
		return value << 10
	}
	return value
}

// formatMemory formats a limit as the real program prints it: from 1 GiB on in whole GiB, rounded
// down. For example, it prints a limit of 1500 MiB as 1G.
func formatMemory(mib uint64) string {
	if mib >= 1024 {
		return fmt.Sprintf("%dG", mib>>10)
	}
	return fmt.Sprintf("%dM", mib)
}

// parseMemoryList parses a list of memory limits such as 0=10G,GPU-…=900M. It returns MiB by device
// number or UUID.
func parseMemoryList(text string) (map[string]uint64, error) {
	limits := map[string]uint64{}
	if text == "" {
		return limits, nil
	}
	for entry := range strings.SplitSeq(text, ",") {
		device, value, found := strings.Cut(strings.TrimSpace(entry), "=")
		mib, err := parseMemory(value)
		if !found || err != nil {
			return nil, fmt.Errorf("%q is not of the form 0=10G,1=900M", text)
		}
		limits[device] = mib
	}
	return limits, nil
}

// environmentLimits returns the thread percentage and the memory limits from the environment. A
// thread percentage of 0 means that none is set.
func environmentLimits() (float64, map[string]uint64, error) {
	threads := 0.0
	if text := os.Getenv(threadsVariable); text != "" {
		var err error
		if threads, err = parseThreads(text); err != nil {
			return 0, nil, fmt.Errorf("%s: %w", threadsVariable, err)
		}
	}
	memory, err := parseMemoryList(os.Getenv(memoryVariable))
	if err != nil {
		return 0, nil, fmt.Errorf("%s: %w", memoryVariable, err)
	}
	return threads, memory, nil
}

func (l Limits) clone() Limits { return Limits{Threads: l.Threads, Memory: maps.Clone(l.Memory)} }

// openUmask clears the umask, so that files get exactly the modes with which they are created.
func openUmask() { syscall.Umask(0) }
