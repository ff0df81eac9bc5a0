package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// mutant is one defect that this program puts into the plugin's code.
type mutant struct {
	name string
	// dir is the package's directory below the root of the repository.
	dir string
	// function is the name of the function to change, written as in a declaration without type
	// parameters: F, T.Method or (*T).Method.
	function string
	edit     edit
}

// apply returns the path of the file to change, and the file's source with the defect.
func (m mutant) apply(root string) (path string, source []byte, err error) {
	f, err := findFunction(root, m.dir, m.function)
	if err == nil {
		source, err = f.with(m.edit)
	}
	if err != nil {
		return "", nil, fmt.Errorf("mutant %q: %s: %s: %w", m.name, m.dir, m.function, err)
	}
	return f.path, source, nil
}

// function is a function declaration with the file that contains it.
type function struct {
	path   string
	source []byte
	files  *token.FileSet
	*ast.FuncDecl
}

// findFunction searches the package in the directory dir for the one function of that name. It
// ignores tests.
func findFunction(root, dir, name string) (*function, error) {
	paths, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
	if err != nil {
		return nil, err
	}
	var found []*function
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		source, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		declared, err := functions(path, source)
		if err != nil {
			return nil, err
		}
		found = append(found, slices.DeleteFunc(declared, func(f *function) bool { return f.name() != name })...)
	}
	switch len(found) {
	case 0:
		return nil, errors.New("the package has no such function")
	case 1:
		return found[0], nil
	}
	return nil, fmt.Errorf("%d functions have this name, among them in %s and %s", len(found), found[0].path, found[1].path)
}

// functions returns all functions of a file that have a body.
func functions(path string, source []byte) ([]*function, error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, source, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var found []*function
	for _, d := range file.Decls {
		if decl, ok := d.(*ast.FuncDecl); ok && decl.Body != nil {
			found = append(found, &function{path, source, files, decl})
		}
	}
	return found, nil
}

// name returns the function's name as [mutant] writes it.
func (f *function) name() string {
	if f.Recv == nil {
		return f.Name.Name
	}
	receiver := f.Recv.List[0].Type
	if star, ok := receiver.(*ast.StarExpr); ok {
		return "(*" + lastName(star.X) + ")." + f.Name.Name
	}
	return lastName(receiver) + "." + f.Name.Name
}

// text returns the source text of a syntax node.
func (f *function) text(n ast.Node) string {
	return string(f.source[f.offset(n.Pos()):f.offset(n.End())])
}

func (f *function) offset(at token.Pos) int { return f.files.Position(at).Offset }

// with returns the source of the function's file after the edit.
func (f *function) with(e edit) ([]byte, error) {
	changes, err := e.changes(f)
	if err != nil {
		return nil, err
	}
	// Changes are applied from the end of the file to its beginning, so that the offsets of the
	// remaining ones stay valid.
	slices.SortFunc(changes, func(a, b change) int { return cmp.Compare(b.from, a.from) })
	source := bytes.Clone(f.source)
	for _, c := range changes {
		source = slices.Replace(source, f.offset(c.from), f.offset(c.to), []byte(c.text)...)
	}
	return source, nil
}
