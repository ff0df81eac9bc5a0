// Package container reads what the runtime gives an OCI hook about its container: the state, on
// standard input, and the configuration, in the bundle.
package container

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/opencontainers/runtime-spec/specs-go"
)

const (
	// maxState and maxConfig are in bytes, far beyond what runtimes write.
	maxState  = 1 << 20
	maxConfig = 64 << 20
)

// Container is one that is being created.
type Container struct {
	State  specs.State
	Config specs.Spec
}

// Read takes the state as the runtime gives it to hooks.
func Read(state io.Reader) (Container, error) {
	var c Container
	if err := decode(io.LimitReader(state, maxState), &c.State); err != nil {
		return c, fmt.Errorf("read the container's state from standard input: %w", err)
	}
	if err := c.readConfig(); err != nil {
		return c, fmt.Errorf("container %.100q: %w", c.State.ID, err)
	}
	return c, nil
}

func (c *Container) readConfig() error {
	if !filepath.IsAbs(c.State.Bundle) {
		return fmt.Errorf("its state has no bundle (%.100q)", c.State.Bundle)
	}
	f, err := os.Open(filepath.Join(c.State.Bundle, "config.json"))
	if err != nil {
		return fmt.Errorf("open its configuration: %w", err)
	}
	defer func() { _ = f.Close() }()
	if err := decode(io.LimitReader(f, maxConfig), &c.Config); err != nil {
		return fmt.Errorf("read its configuration %s: %w", f.Name(), err)
	}
	return nil
}

func decode(from io.Reader, into any) error {
	err := json.NewDecoder(from).Decode(into)
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
