package layout

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
)

// tree is what a folder should hold, by path below it. It is brought about without a moment in which what stays is missing: somebody may be
// reading.
type tree map[string]entry

// entry is a file, a symbolic link, or a folder that may stay empty.
type entry struct {
	content string
	mode    fs.FileMode
	link    string
	folder  bool
}

func (t tree) file(name, content string, mode fs.FileMode) {
	t[name] = entry{content: content, mode: mode}
}

// symlink makes a relative link; both paths are below the tree's folder.
func (t tree) symlink(name, to string) error {
	target, err := filepath.Rel(path.Dir(name), to)
	if err != nil {
		return err
	}
	t[name] = entry{link: target}
	return nil
}

func (t tree) folder(name string) { t[name] = entry{folder: true} }

// folders are all folders that the entries need.
func (t tree) folders() map[string]bool {
	needed := map[string]bool{".": true}
	for name, e := range t {
		if e.folder {
			needed[name] = true
		}
		for above := path.Dir(name); !needed[above]; above = path.Dir(above) {
			needed[above] = true
		}
	}
	return needed
}

// apply makes the folder hold the tree and nothing else.
func (t tree) apply(root string) error {
	folders := t.folders()
	if err := os.MkdirAll(root, 0o755); err != nil {
		return err
	}
	if err := t.removeOthers(root, folders); err != nil {
		return err
	}
	var names []string
	for name := range t {
		names = append(names, name)
	}
	slices.Sort(names)
	for name := range folders {
		if err := os.MkdirAll(filepath.Join(root, name), 0o755); err != nil {
			return err
		}
	}
	for _, name := range names {
		if err := t[name].write(filepath.Join(root, name)); err != nil {
			return err
		}
	}
	return nil
}

func (t tree) removeOthers(root string, folders map[string]bool) error {
	var doomed []string
	err := filepath.WalkDir(root, func(full string, have fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, full)
		if err != nil {
			return err
		}
		wanted, listed := t[name]
		switch {
		case have.IsDir() && folders[name]:
			return nil
		case !have.IsDir() && listed && !wanted.folder && (wanted.link != "") == (have.Type()&fs.ModeSymlink != 0):
			return nil
		}
		doomed = append(doomed, full)
		if have.IsDir() {
			return fs.SkipDir
		}
		return nil
	})
	for _, full := range doomed {
		err = errors.Join(err, os.RemoveAll(full))
	}
	return err
}

// write brings one entry about, by rename, unless it is there already.
func (e entry) write(full string) error {
	switch {
	case e.folder:
		return nil
	case e.link != "":
		return link(e.link, full)
	}
	if info, err := os.Lstat(full); err == nil && info.Mode() == e.mode {
		if have, err := os.ReadFile(full); err == nil && string(have) == e.content {
			return nil
		}
	}
	fresh := full + ".new"
	if err := os.WriteFile(fresh, []byte(e.content), e.mode); err != nil {
		return err
	}
	return errors.Join(os.Chmod(fresh, e.mode), os.Rename(fresh, full))
}
