package statefile_test

import (
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

const path = "/state/thing.json"

var format = statefile.Format{Kind: "Thing", Version: 3, MinReader: 2}

func TestWrittenFileIsRead(t *testing.T) {
	disk := durabletest.New()
	var got []string
	if found, err := format.Read(disk, path, &got); found || err != nil {
		t.Fatal(found, err)
	}
	for _, want := range []string{"first", "second"} {
		if err := format.Write(disk, path, []string{want}); err != nil {
			t.Fatal(err)
		}
		disk.PowerCut()
		if found, err := format.Read(disk, path, &got); !found || err != nil || len(got) != 1 || got[0] != want {
			t.Fatal(got, found, err)
		}
	}
	if err := format.Write(disk, path, func() {}); err == nil || !strings.Contains(err.Error(), path) {
		t.Error(err)
	}
}

func TestMinReaderDecidesWhoReads(t *testing.T) {
	for written, readable := range map[statefile.Format]bool{
		{Kind: "Thing", Version: 1, MinReader: 1}: true,
		{Kind: "Thing", Version: 3, MinReader: 3}: true,
		{Kind: "Thing", Version: 9, MinReader: 3}: true,
		{Kind: "Thing", Version: 4, MinReader: 4}: false,
		{Kind: "Other", Version: 9, MinReader: 9}: false,
	} {
		disk := durabletest.New()
		if err := written.Write(disk, path, 1); err != nil {
			t.Fatal(err)
		}
		before, _ := disk.ReadFile(path)
		_, readErr := format.Read(disk, path, new(int))
		writeErr := format.Write(disk, path, 2)
		for _, err := range []error{readErr, writeErr} {
			newer := new(statefile.NewerError)
			if readable != (err == nil) || !readable && (!errors.As(err, &newer) || !strings.Contains(err.Error(), path) ||
				!strings.Contains(err.Error(), "install the later driver again")) {
				t.Errorf("%+v: %v", written, err)
			}
		}
		if after, _ := disk.ReadFile(path); readable == (string(before) == string(after)) {
			t.Errorf("%+v: %s became %s", written, before, after)
		}
	}
}

// A later version may change everything in the envelope but minReader.
func TestMinReaderIsReadFromUnknownEnvelope(t *testing.T) {
	disk := durabletest.New()
	content := `{"kind":["Thing"],"version":"9.1","minReader":9,"checksum":{"crc":1},"payload":"` + "…" + `"}`
	disk.Put(path, []byte(content))
	newer := new(statefile.NewerError)
	if _, err := format.Read(disk, path, new(string)); !errors.As(err, &newer) || newer.MinReader != 9 {
		t.Error(err)
	}
	if err := format.Write(disk, path, "new"); !errors.As(err, &newer) {
		t.Error(err)
	}
	if after, _ := disk.ReadFile(path); string(after) != content {
		t.Errorf("the file became %s", after)
	}
}

func TestDamagedFileIsUnreadableAndMayBeReplaced(t *testing.T) {
	good := written(t, "content")
	replaced := func(old, by string) string { return strings.Replace(string(good), old, by, 1) }
	for name, content := range map[string]string{
		"empty": "", "white space": " \n", "truncated": string(good[:len(good)/2]), "two files": string(good) + string(good),
		"no minReader": replaced(`"minReader":2,`, ""), "a negative minReader": replaced(`"minReader":2`, `"minReader":-1`),
		"another kind": replaced("Thing", "Other"), "no checksum": replaced("sha256:", ""), "another payload": replaced("content", "altered"),
		"a payload of another type": string(written(t, 7)), "no object": `[]`, "null": `null`,
	} {
		disk := durabletest.New()
		disk.Put(path, []byte(content))
		var unreadable *statefile.UnreadableError
		if found, err := format.Read(disk, path, new(string)); !found || !errors.As(err, &unreadable) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v, %v", name, found, err)
		}
		if err := format.Write(disk, path, "new"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// written returns the content of a file with this payload.
func written(t *testing.T, payload any) []byte {
	t.Helper()
	disk := durabletest.New()
	if err := format.Write(disk, path, payload); err != nil {
		t.Fatal(err)
	}
	raw, err := disk.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// Not even an I/O error proves that the content is lost: the path to the disk may come back.
func TestFailedReadIsNotUnreadable(t *testing.T) {
	for _, failure := range []error{syscall.EMFILE, syscall.EACCES, syscall.EIO} {
		disk := durabletest.New()
		disk.Put(path, written(t, "x"))
		disk.FailReads(path, failure)
		var unreadable *statefile.UnreadableError
		if found, err := format.Read(disk, path, new(string)); !found || !errors.Is(err, failure) || errors.As(err, &unreadable) {
			t.Errorf("%v: %v, %v", failure, found, err)
		}
	}
}
