package persistenced

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const gpu = "0001:1b:00.0"

// served is a daemon that answers its next call with these words, after "id" of the call.
func served(t *testing.T, answer func(call []uint32) []uint32) Daemon {
	t.Helper()
	d := In(t.TempDir())
	if err := os.MkdirAll(filepath.Dir(d.socket), 0o700); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", d.socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			if call, err := readRecord(connection); err == nil {
				if words := answer(call); words != nil {
					_ = writeRecord(connection, words)
				} else {
					_, _ = io.Copy(io.Discard, connection)
				}
			}
			_ = connection.Close()
		}
	}()
	return d
}

func TestAnswers(t *testing.T) {
	accepted := func(result ...uint32) []uint32 { return append([]uint32{1, 1, 0, 0, 0, 0}, result...) }
	for name, c := range map[string]struct {
		answer []uint32
		keeps  bool
		fails  string
	}{
		"keeps it open":         {answer: accepted(0, 1), keeps: true},
		"has it closed":         {answer: accepted(0, 0)},
		"does not know it":      {answer: accepted(2)},
		"caller is not root":    {answer: accepted(7), fails: "NvPdStatus 7"},
		"no result":             {answer: accepted(), fails: "answered"},
		"no mode":               {answer: accepted(0), fails: "answered"},
		"call denied":           {answer: []uint32{1, 1, 1, 0, 2, 2, 0}, fails: "answered"},
		"no such procedure":     {answer: []uint32{1, 1, 0, 0, 0, 3, 0}, fails: "answered"},
		"answer of another":     {answer: []uint32{2, 1, 0, 0, 0, 0, 0}, fails: "answered"},
		"longer than any":       {answer: make([]uint32, 1000), fails: "record"},
		"nothing but a message": {answer: []uint32{}, fails: "answered"},
	} {
		t.Run(name, func(t *testing.T) {
			d := served(t, func([]uint32) []uint32 { return c.answer })
			keeps, err := d.Keeps(t.Context(), gpu)
			if keeps != c.keeps || (err != nil) != (c.fails != "") || (err != nil && !strings.Contains(err.Error(), c.fails)) {
				t.Errorf("%t, %v", keeps, err)
			}
		})
	}
}

func TestCallToClose(t *testing.T) {
	var got []uint32
	d := served(t, func(call []uint32) []uint32 {
		got = call
		return []uint32{1, 1, 0, 0, 0, 0, 0}
	})
	if err := d.Close(t.Context(), gpu); err != nil || !d.HasSocket() {
		t.Fatal(err)
	}
	want := []uint32{1, 0, 2, 35006, 1, 1, 0, 0, 0, 0, 1, 0x1b, 0, 0, 0}
	if len(got) != len(want) {
		t.Fatalf("call %v, want %v", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("call %v, want %v", got, want)
		}
	}
}

func TestHungDaemonCostsNoMoreThanTheContext(t *testing.T) {
	d := served(t, func([]uint32) []uint32 { return nil })
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := d.Close(ctx, gpu); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestNoDaemon(t *testing.T) {
	missing := In(t.TempDir())
	if err := missing.Close(t.Context(), gpu); err != nil || missing.HasSocket() {
		t.Errorf("without a socket: %v", err)
	}
	dead := served(t, nil)
	if err := os.Remove(dead.socket); err != nil {
		t.Fatal(err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: dead.socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	_ = listener.Close()
	if keeps, err := dead.Keeps(t.Context(), gpu); err != nil || keeps {
		t.Errorf("with the socket of a daemon that was killed: %t, %v", keeps, err)
	}
	if _, err := dead.Keeps(t.Context(), "0000"); err == nil {
		t.Error("no error for an invalid PCI address")
	}
}
