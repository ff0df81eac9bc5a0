package cluster

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/machine"
)

// LogDirs returns each machine's folder of log files, by the machine's name. It works after a
// failed start too. Each folder holds init.log, boot-hook.log and one file per component, and a
// folder pods with the logs of containers. Down deletes all of them.
func LogDirs(name string) (map[string]string, error) {
	if name == "" {
		name = DefaultName
	}
	known, err := readState(name)
	if err != nil {
		return nil, fmt.Errorf("find the logs of cluster %s: %w", name, err)
	}
	dirs := map[string]string{}
	for _, machineName := range append([]string{controlPlane}, known.Nodes...) {
		dirs[machineName] = (&machine.Spec{Dir: machineDir(name, machineName)}).LogDir()
	}
	return dirs, nil
}

// SaveLogs copies each machine's logs into a folder below target, so that they outlive the cluster.
func SaveLogs(name, target string) error {
	dirs, err := LogDirs(name)
	if err != nil {
		return err
	}
	for machineName, dir := range dirs {
		if err := copyFiles(dir, filepath.Join(target, machineName)); err != nil {
			return fmt.Errorf("save the logs of %s: %w", machineName, err)
		}
	}
	return nil
}

// copyFiles copies regular files and their folders. It skips symbolic links: the links from
// containers to Pods point to files that are copied anyway.
func copyFiles(from, to string) error {
	return filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, relative)
		switch {
		case entry.IsDir():
			return os.MkdirAll(target, 0o755)
		case entry.Type().IsRegular():
			return copyFile(path, target)
		}
		return nil
	})
}

func copyFile(from, to string) error {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = source.Close() }()
	target, err := os.Create(to)
	if err != nil {
		return err
	}
	if _, err := io.Copy(target, source); err != nil {
		_ = target.Close()
		return err
	}
	return target.Close()
}
